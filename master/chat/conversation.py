"""What was said: a system message and turns; kept in files as JSON."""

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
    """What the user said, and what was answered."""

    user: str
    assistant: str
    used: int = field(default=0, compare=False)  # tokens of the context after it, as far as that is known
    tokens: tuple[int, ...] = field(default=(), compare=False)  # of the answer, where they are known
    shown: str = field(default="", compare=False)  # of the answer, thinking included
    ended: bool = field(default=False, compare=False)  # it came to its own end, as far as that is known


@dataclass
class Conversation:
    """Everything that was said; `dropped` counts the oldest turns, which the model is not shown any more."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    dropped: int = 0
    unsaid: Turn | None = None  # the last one, where it was cut before it said anything: it is not one of `turns`

    @property
    def used(self) -> int:
        """Tokens of the context that were taken after the last turn; 0 where that is not known."""
        return self.turns[-1].used if self.turns else 0

    @property
    def unfinished(self) -> Turn | None:
        """The last turn, unless its answer came to its own end."""
        last = self.unsaid or (self.turns[-1] if self.turns else None)
        return None if last is None or last.ended else last

    def messages(self, user: str, dropped: int) -> list[Message]:
        """What the model is asked when `user` is said: the system message, and all turns but the oldest `dropped`."""
        return [*self._said(self.turns[dropped:]), {"role": "user", "content": user}]

    def save(self, path: Path) -> None:
        """Write everything to `path`, readable for its owner alone.

        Raises:
            UsageError: if it cannot be written, or there is a file that is no saved conversation.
        """
        try:
            if path.exists():
                Conversation.load(path)
        except UsageError:
            raise UsageError(f"{path} exists and is no saved conversation; give another name") from None
        text = json.dumps({"messages": self._said(self.turns)}, ensure_ascii=False, indent=1) + "\n"
        try:
            write_atomically(path, text.encode())
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}; give another name") from error

    @classmethod
    def load(cls, path: Path) -> "Conversation":
        """Read what `save` wrote.

        Raises:
            UsageError: if the file cannot be read, or is no conversation of a system message and whole turns.
        """
        try:
            with path.open("rb") as file:
                data = file.read(MOST_BYTES)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}; name a file that /save has written") from error
        try:
            return _conversation(json.loads(data)["messages"])
        except (ValueError, TypeError, KeyError, RecursionError, UsageError):
            raise UsageError(f"{path} is no saved conversation; name a file that /save has written") from None

    def _said(self, turns: Sequence[Turn]) -> list[Message]:
        system: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        pairs = ((("user", turn.user), ("assistant", turn.assistant)) for turn in turns)
        return system + [{"role": role, "content": content} for pair in pairs for role, content in pair]


def _conversation(messages: Any) -> Conversation:
    """Raises KeyError, TypeError or ValueError where `messages` is not what `save` writes, UsageError for odd text."""
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
