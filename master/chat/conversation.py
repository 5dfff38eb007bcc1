"""A conversation: a system message and turns; it can be saved to a file as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from master.text.prompts import MOST_BYTES, checked_text
from master.text.tokenizer import Message
from tpi.errors import UsageError
from tpi.system.atomic import write_atomically


@dataclass(frozen=True)
class Turn:
    """A message of the user, and the answer to it."""

    user: str
    assistant: str
    used: int = field(default=0, compare=False)  # tokens of the context in use after the turn; 0 if not known
    tokens: tuple[int, ...] = field(default=(), compare=False)  # token ids of the answer; empty if not known
    shown: str = field(default="", compare=False)  # the answer as shown, with its reasoning
    ended: bool = field(default=False, compare=False)  # the model ended the answer itself; False if not known


@dataclass
class Conversation:
    """A whole conversation. The `dropped` oldest turns are no longer sent to the model."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    dropped: int = 0
    unsaid: Turn | None = None  # the last turn, if its answer was cut before it had any text; not in `turns`

    @property
    def used(self) -> int:
        """Tokens of the context in use after the last turn; 0 if not known."""
        return self.turns[-1].used if self.turns else 0

    @property
    def unfinished(self) -> Turn | None:
        """The last turn if its answer is not known to be complete, else None."""
        last = self.unsaid or (self.turns[-1] if self.turns else None)
        return None if last is None or last.ended else last

    def messages(self, user: str, dropped: int) -> list[Message]:
        """Return the messages for the model: system message, turns without the oldest `dropped`, then `user`."""
        return [*self._said(self.turns[dropped:]), {"role": "user", "content": user}]

    def save(self, path: Path) -> None:
        """Write everything to `path`, readable by its owner only.

        Raises:
            UsageError: if the file cannot be written, or exists and is not a saved conversation.
        """
        try:
            if path.exists():
                Conversation.load(path)
        except UsageError:
            raise UsageError(f"{path} exists and is not a saved conversation; give another name") from None
        text = json.dumps({"messages": self._said(self.turns)}, ensure_ascii=False, indent=1) + "\n"
        try:
            write_atomically(path, text.encode())
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; give another name") from error

    @classmethod
    def load(cls, path: Path) -> "Conversation":
        """Return the conversation that `save` wrote.

        Raises:
            UsageError: if the file cannot be read, or is not a conversation of a system message and whole turns.
        """
        try:
            with path.open("rb") as file:
                data = file.read(MOST_BYTES)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}; name a file that /save has written") from error
        try:
            return _conversation(json.loads(data)["messages"])
        except (ValueError, TypeError, KeyError, RecursionError, UsageError):
            raise UsageError(f"{path} is not a saved conversation; name a file that /save has written") from None

    def _said(self, turns: Sequence[Turn]) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        pairs = ((("user", turn.user), ("assistant", turn.assistant)) for turn in turns)
        return system + [{"role": role, "content": content} for pair in pairs for role, content in pair]


def _conversation(messages: Any) -> Conversation:
    """Return the conversation in `messages`, the content of a saved file.

    Raises:
        KeyError, TypeError, ValueError: if `messages` is not of the form that `save` writes.
        UsageError: if a text has characters that a prompt cannot have.
    """
    said = [(message["role"], message["content"]) for message in messages]
    for _, content in said:
        if not isinstance(content, str):
            raise TypeError
        checked_text(content, "a message")
    system = said.pop(0)[1] if said and said[0][0] == "system" else None
    if [role for role, _ in said] != ["user", "assistant"] * (len(said) // 2):
        raise ValueError
    users, answers = said[0::2], said[1::2]
    return Conversation(system, [Turn(user, answer) for (_, user), (_, answer) in zip(users, answers, strict=True)])
