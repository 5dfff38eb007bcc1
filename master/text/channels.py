"""Harmony, the way in which gpt-oss writes: what it thinks, says and calls in channels, which control tokens begin.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`. A channel may name
who is spoken to: `commentary to=functions.weather`. Here such text, as it comes, becomes pieces of channels; whoever
shows it decides how.
"""

from dataclasses import dataclass

from master.text.thoughts import ShownThoughts

START, CHANNEL, MESSAGE, KIND = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
SPELLED = (START, CHANNEL, MESSAGE, "<|end|>", "<|return|>", "<|call|>", KIND)
"""Control tokens that must be seen as they are spelled."""
THINKING, TOOL = "analysis", "functions."
_MARKERS = (CHANNEL, MESSAGE, *ENDS)


def has_channels(template: str | None) -> bool:
    """Whether models of this chat template write so."""
    return template is not None and CHANNEL in template and MESSAGE in template


@dataclass(frozen=True)
class ChannelText:
    """More of what stands in a channel.

    Attributes:
        channel: its name: `analysis`, `commentary`, `final`; empty for text outside of any.
        to: who is spoken to, such as `functions.weather`; empty for the user.
        text: what came; may be empty where it ends.
        ended: nothing more comes in it.
    """

    channel: str
    to: str
    text: str
    ended: bool = False

    @property
    def thought(self) -> bool:
        """Whether it is thinking, which is not for the user."""
        return self.channel == THINKING and not self.to


class Channels:
    """Cuts an answer into channels as it comes. Markers come whole, for each is one token.

    What comes before any marker stands in no channel, unless it names who is spoken to.
    """

    def __init__(self) -> None:
        self._header: str | None = ""  # text before <|message|>; None: inside a message, or before any marker
        self._channel = self._to = ""
        self._fresh = True  # no marker came

    def push(self, text: str) -> list[ChannelText]:
        """What `text` adds."""
        found: list[ChannelText] = []
        while text:
            at, marker = _next(text)
            found += self._take(text[:at])
            text = text[at + len(marker) :]
            if marker:
                found += self._turn(marker)
        return found

    def flush(self) -> list[ChannelText]:
        """The end of the answer."""
        header, self._header = self._header, ""
        if header is None:
            return [ChannelText(self._channel, self._to, "", True)]
        return [ChannelText("", "", header, True)] if self._fresh and header else []

    def _take(self, text: str) -> list[ChannelText]:
        if self._fresh and self._header is not None and not _names_somebody(self._header + text):
            text, self._header = self._header + text, None
        if self._header is None:
            return [ChannelText(self._channel, self._to, text)] if text else []
        self._header += text
        return []

    def _turn(self, marker: str) -> list[ChannelText]:
        inside = self._header is None and (not self._fresh or marker in ENDS)
        ended = [ChannelText(self._channel, self._to, "", True)] if inside else []
        self._fresh = False
        if marker == MESSAGE:
            self._open(self._header or "")
        elif marker == CHANNEL:  # a recipient may stand before it
            self._header = f"{self._header or ''}{CHANNEL}"
        else:
            self._header, self._channel, self._to = "", "", ""
        return ended

    def _open(self, header: str) -> None:
        words = header.replace(CHANNEL, f" {CHANNEL}").replace(KIND, " ").split()
        names = [word.removeprefix(CHANNEL) for word in words if word.startswith(CHANNEL)]
        self._channel = names[-1] if names else "final"
        self._to = next((word.removeprefix("to=") for word in words if word.startswith("to=")), "")
        self._header = None


class ShownChannels:
    """The text of an answer for people: thinking between tags, the answer after it. Calls are shown as they are."""

    def __init__(self) -> None:
        self._channels, self._thoughts = Channels(), ShownThoughts()

    @property
    def said(self) -> str:
        """The answer without thinking."""
        return self._thoughts.said

    def push(self, text: str) -> str:
        """What is to be shown once `text` came."""
        return "".join(map(self._shown, self._channels.push(text)))

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        return "".join(map(self._shown, self._channels.flush())) + self._thoughts.flush()

    def _shown(self, part: ChannelText) -> str:
        return (self._thoughts.think if part.thought else self._thoughts.say)(part.text)


def _names_somebody(header: str) -> bool:
    """Whether a text before any marker is `to=` and a name, or may become that."""
    words = header.lstrip()
    return words.startswith("to=") or "to=".startswith(words)


def _next(text: str) -> tuple[int, str]:
    """Where the first marker stands, and which it is; the end of `text` and none if there is none."""
    found = [(at, marker) for marker in _MARKERS if (at := text.find(marker)) >= 0]
    return min(found, default=(len(text), ""))
