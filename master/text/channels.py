"""Harmony, the format of gpt-oss's answers: thinking, text and tool calls in channels marked by control tokens.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>`. A channel may name
a recipient: `commentary to=functions.weather`. Muse Glimmer's answers have recipients in place of channels:
`<|start|>assistant to=self<|message|>...<|eom|>` is thinking, and `to=user` the answer. This module cuts such text into
pieces by channel as it comes; the caller decides how to show the pieces.
"""

from dataclasses import dataclass

from master.text.thoughts import ShownThoughts

START, CHANNEL, MESSAGE, KIND = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|eom|>", START)
SPELLED = (START, CHANNEL, MESSAGE, "<|end|>", "<|return|>", "<|call|>", "<|eom|>", KIND)
"""Control tokens that must reach this module as text."""
THINKING, TOOL, SELF = "analysis", "functions.", "self"
_MARKERS = (CHANNEL, MESSAGE, *ENDS)


def has_channels(template: str | None) -> bool:
    """Return True if models with this chat template write in channels."""
    return template is not None and CHANNEL in template and MESSAGE in template


def has_recipients(template: str | None) -> bool:
    """Return True if models with this chat template name the recipient of each part of an answer."""
    return template is not None and all(mark in template for mark in (START, MESSAGE, f"to={SELF}"))


@dataclass(frozen=True)
class ChannelText:
    """A further piece of the text in a channel.

    Attributes:
        channel: the channel's name: `analysis`, `commentary` or `final`; empty for text outside any channel.
        to: the recipient, such as `functions.weather`; empty for the user.
        text: the new text; may be empty in the last piece.
        ended: True for the last piece in the channel.
    """

    channel: str
    to: str
    text: str
    ended: bool = False

    @property
    def thought(self) -> bool:
        """True if the text is the model's thinking, which is not for the user."""
        return self.to == SELF or (self.channel == THINKING and not self.to)


class Channels:
    """Parser that cuts an answer into channels as it comes. Each marker is one token, so it comes whole.

    Text before any marker belongs to no channel, unless it names a recipient.
    """

    def __init__(self) -> None:
        # text between a marker and <|message|>; None: inside a message, or before any marker
        self._header: str | None = ""
        self._channel = self._to = ""
        self._fresh = True  # no marker has come yet

    def push(self, text: str) -> list[ChannelText]:
        """Parse more text; return the pieces that it adds."""
        found: list[ChannelText] = []
        while text:
            at, marker = _next(text)
            found += self._take(text[:at])
            text = text[at + len(marker) :]
            if marker:
                found += self._turn(marker)
        return found

    def flush(self) -> list[ChannelText]:
        """Return the last pieces, at the end of the answer."""
        header, self._header = self._header, ""
        if header is None:
            return [ChannelText(self._channel, self._to, "", True)]
        return [ChannelText("", "", header, True)] if self._fresh and header else []

    def _take(self, text: str) -> list[ChannelText]:
        if self._fresh and self._header is not None and not _names_recipient(self._header + text):
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
        elif marker == CHANNEL:  # a recipient may come before the marker
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
    """The text of an answer for the user: thinking between tags, then the answer. Tool calls are shown unchanged."""

    def __init__(self) -> None:
        self._channels, self._thoughts = Channels(), ShownThoughts()

    @property
    def said(self) -> str:
        """The answer without the thinking."""
        return self._thoughts.said

    def push(self, text: str) -> str:
        """Return the text to show for `text`."""
        return "".join(map(self._shown, self._channels.push(text)))

    def flush(self) -> str:
        """Return the rest of the text to show, at the end of the answer."""
        return "".join(map(self._shown, self._channels.flush())) + self._thoughts.flush()

    def _shown(self, part: ChannelText) -> str:
        return (self._thoughts.think if part.thought else self._thoughts.say)(part.text)


def _names_recipient(header: str) -> bool:
    """Return True if `header`, a text before any marker, is `to=` and a name, or may become such a text."""
    words = header.lstrip()
    return words.startswith("to=") or "to=".startswith(words)


def _next(text: str) -> tuple[int, str]:
    """Return the index of the first marker, and the marker; the length of `text` and "" if there is none."""
    found = [(at, marker) for marker in _MARKERS if (at := text.find(marker)) >= 0]
    return min(found, default=(len(text), ""))
