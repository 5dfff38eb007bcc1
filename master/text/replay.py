"""The exact tokens of earlier answers, so that a conversation that a client sends back is found in the KV cache."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from master.text.tokenizer import Message

_MOST = 512  # number of answers that are remembered


@dataclass(frozen=True)
class _Said:
    tokens: tuple[int, ...]
    thought: bool  # True if the answer has thinking, which templates leave out of earlier turns


class Replay:
    """A store of the latest answers' tokens, by the answer's text or by the id of its first tool call.

    An answer is found only with the `salt` for which it was made, so that no client learns the answers to other
    clients.
    """

    def __init__(self) -> None:
        self._said: OrderedDict[bytes, _Said] = OrderedDict()

    def remember(
        self, text: str, calls: Sequence[str], tokens: Sequence[int], thought: bool, salt: bytes = b""
    ) -> None:
        """Record an answer of `tokens` (without the end of turn), sent as `text` and calls with the ids `calls`."""
        if calls or not thought:
            self._said[_key(text, calls, salt)] = _Said(tuple(tokens), thought)
        while len(self._said) > _MOST:
            self._said.popitem(last=False)

    def find(self, messages: Sequence[Message], salt: bytes = b"") -> dict[int, tuple[int, ...]]:
        """Return the tokens of the recorded answers among `messages`, by index in `messages`."""
        last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
        found = {}
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                calls = [call.get("id", "") for call in message.get("tool_calls") or ()]
                key = _key(message["content"], calls, salt)
                said = self._said.get(key)
                if said is not None and (index > last or not said.thought):
                    self._said.move_to_end(key)
                    found[index] = said.tokens
        return found


def _key(text: str, calls: Sequence[str], salt: bytes) -> bytes:
    said = f"call {calls[0]}" if calls else f"text {text}"
    return sha256(salt + said.encode()).digest()
