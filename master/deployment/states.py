"""Allocation of the states of recurrent layers: the master assigns states to slots, for all nodes.

A slot holds a state of all recurrent layers, after some token of a sequence. After a step of at most `STREAM_TOKENS`
tokens, the sequence can continue after any of its tokens in that step (`tpi.kernels.recurrent.spec`): the position of
its next step says after which one. A state cannot be cut back further. Therefore the states after some full pages are
*kept* under the key of the page, and a sequence that begins with the same tokens continues from the latest of them. A
sequence never writes to a slot that is kept: its next step reads that slot and writes another one.
"""

from collections import Counter
from collections.abc import Sequence as SequenceOf

from master.deployment.prefixindex import Key
from tpi.errors import PlanError


class StatePool:
    """The slots for states in a deployment. A slot may be held by sequences, kept under a key, both, or neither."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._empty = list(range(total - 1, -1, -1))
        self._kept: dict[Key, int] = {}  # the least recently used first
        self._keys: dict[int, Key] = {}
        self._holders = Counter[int]()

    def take(self) -> int:
        """Hold and return a slot to write to: an empty slot, or the kept slot that was least recently used.

        Raises:
            PlanError: if sequences hold all slots.
        """
        if not self._empty:
            unheld = next((key for key, slot in self._kept.items() if not self._holders[slot]), None)
            if unheld is None:
                raise PlanError(f"all {self.total} states of recurrent layers are in use; raise -c, which adds states")
            self.drop(unheld)
        slot = self._empty.pop()
        self._holders[slot] = 1
        return slot

    def find(self, keys: SequenceOf[Key]) -> tuple[int, int | None]:
        """Hold the state of the last of `keys` that has a state; return the number of keys up to it, and its slot."""
        for count in range(len(keys), 0, -1):
            if (slot := self._kept.get(keys[count - 1])) is not None:
                self._kept[keys[count - 1]] = self._kept.pop(keys[count - 1])
                self._holders[slot] += 1
                return count, slot
        return 0, None

    def writable(self, slot: int) -> bool:
        """Return True if the sequence that holds `slot` may write to it: no other holds it, and it is not kept."""
        return slot not in self._keys and self._holders[slot] == 1

    def keep(self, slot: int, key: Key) -> bool:
        """Keep `slot` under `key`; return False if another slot is kept there already."""
        if key in self._kept or slot in self._keys:
            return False
        self._kept[key], self._keys[slot] = slot, key
        return True

    def drop(self, key: Key) -> None:
        """Stop keeping the slot of `key`, if there is one; the slot becomes empty unless a sequence holds it."""
        if (slot := self._kept.pop(key, None)) is not None:
            del self._keys[slot]
            self._free(slot)

    def release(self, slot: int) -> None:
        """End one sequence's hold of `slot`."""
        self._holders[slot] -= 1
        self._free(slot)

    def _free(self, slot: int) -> None:
        if slot not in self._keys and not self._holders[slot]:
            del self._holders[slot]
            self._empty.append(slot)
