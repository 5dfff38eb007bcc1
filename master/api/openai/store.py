"""Stored responses, which later requests continue. Only the owner of a response can find it.

The total size of all responses is limited.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from master.api.failures import RequestError
from master.text.tokenizer import Message
from master.text.values import texts_of

MOST_KEPT = 256
"""Limit of stored responses of all owners together."""

MOST_CHARACTERS = 16 << 20
"""Approximate limit of the characters in all stored responses together."""


@dataclass(frozen=True)
class _Kept:
    turns: tuple[Message, ...]
    items: tuple[str, ...]  # ids of the items
    size: int  # characters


@dataclass
class KeptTurns:
    """The stored responses of one owner: the turns up to each response by its id, and all their items by id."""

    known: dict[str, Message] = field(default_factory=dict)
    _kept: OrderedDict[str, _Kept] = field(default_factory=OrderedDict)
    size: int = 0  # characters

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, name: str | None) -> tuple[Message, ...]:
        """Return the turns up to and including a response; none if `name` is None.

        Raises:
            RequestError: if this owner has no stored response of that name.
        """
        if name is None:
            return ()
        if name not in self._kept:
            said = f"response {name[:100]!r} is unknown or no longer stored; send the whole conversation as input"
            raise RequestError(said, "previous_response_id", "previous_response_not_found", 404)
        return self._kept[name].turns

    def keep(self, name: str, turns: Sequence[Message], items: Mapping[str, Message]) -> None:
        """Store a response and its items."""
        one = _Kept(tuple(turns), tuple(items), sum(map(len, texts_of(turns))))
        self._kept[name] = one
        self.known.update(items)
        self.size += one.size

    def forget(self) -> None:
        """Remove this owner's oldest response and its items."""
        _, oldest = self._kept.popitem(last=False)
        self.size -= oldest.size
        for item in oldest.items:
            self.known.pop(item, None)


class ResponseStore:
    """The responses of all owners. If there are too many, the owner with the most loses its oldest."""

    def __init__(self, most: int = MOST_KEPT, characters: int = MOST_CHARACTERS) -> None:
        self._most, self._characters = most, characters
        self._owners: dict[bytes, KeptTurns] = {}

    def of(self, owner: bytes) -> KeptTurns:
        """Return the responses of an owner, for reading only."""
        return self._owners.get(owner, KeptTurns())

    def keep(self, owner: bytes, name: str, turns: Sequence[Message], items: Mapping[str, Message]) -> None:
        """Store a response of an owner with its items, and remove the oldest responses beyond the limits."""
        self._owners.setdefault(owner, KeptTurns()).keep(name, turns, items)
        while (over := sum(one.size for one in self._owners.values()) > self._characters) or self._count > self._most:
            most = max(self._owners, key=lambda each: self._weight(each, over))
            self._owners[most].forget()
            if not self._owners[most]:
                del self._owners[most]

    @property
    def _count(self) -> int:
        return sum(map(len, self._owners.values()))

    def _weight(self, owner: bytes, by_size: bool) -> int:
        kept = self._owners[owner]
        return kept.size if by_size else len(kept)
