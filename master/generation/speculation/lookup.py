"""Drafts by lookup: tokens that followed an earlier occurrence of the latest tokens, in the text or earlier answers.

Saxena (2023), Prompt Lookup Decoding.
"""

from array import array
from collections import OrderedDict
from collections.abc import MutableSequence

import numpy as np
import numpy.typing as npt

from master.deployment.prefixindex import Key

Ids = npt.NDArray[np.int32]

_SHORTEST = 2  # shortest match in tokens
_LONGEST = 16  # longest match in tokens that is compared
_COMPARED = 16  # latest occurrences that are compared
_OF_A_SALT = 1 << 16  # tokens of earlier answers that are searched
_SALTS = 16  # salts whose earlier answers are kept
_END = -1  # stands between two answers


def find(text: Ids, latest: Ids) -> tuple[int, int]:
    """Find the longest end of `latest` that occurs in `text`; return the index after it in `text`, and its length.

    Of several occurrences with this length, take the last one. An occurrence at the very end of `text` does not count,
    because no token follows it. The length is 0 if the last two tokens of `latest` do not occur together.
    """
    if len(latest) < _SHORTEST or len(text) <= _SHORTEST:
        return 0, 0
    ends = np.flatnonzero((text[1:-1] == latest[-1]) & (text[:-2] == latest[-2]))[-_COMPARED:] + 2
    lengths = [(_alike(text[max(0, end - _LONGEST) : end], latest), int(end)) for end in ends]
    length, end = max(lengths, default=(0, 0))
    return end, length


def _alike(one: Ids, other: Ids) -> int:
    """Return how many last tokens both texts have in common, at most `_LONGEST`."""
    most = min(len(one), len(other), _LONGEST)
    different = np.flatnonzero(one[len(one) - most :] != other[len(other) - most :])
    return most - 1 - int(different[-1]) if len(different) else most


class EarlierAnswers:
    """The latest answers of a server, kept apart by salt, so that no client learns of another client's text."""

    def __init__(self) -> None:
        self._answers: OrderedDict[Key, array[int]] = OrderedDict()

    def keep(self, salt: Key, tokens: MutableSequence[int]) -> None:
        """Add an answer to those of its salt.

        If the salt then has too many tokens, forget its oldest ones. If there are too many salts, forget the one
        whose last answer is the oldest.
        """
        kept = self._answers.setdefault(salt, array("i"))
        kept.extend(tokens)
        kept.append(_END)
        del kept[:-_OF_A_SALT]
        self._answers.move_to_end(salt)
        while len(self._answers) > _SALTS:
            self._answers.popitem(last=False)

    def of(self, salt: Key) -> Ids:
        """Return the earlier answers of a salt, without a copy.

        While the result exists, `keep` for this salt raises BufferError, so drop it before.
        """
        return ids(self._answers.get(salt, array("i")))


def ids(tokens: MutableSequence[int]) -> Ids:
    """Return tokens as a NumPy array, without a copy if `tokens` is an array.

    While the result exists, nothing can be appended to `tokens`, so keep it only for a short time.
    """
    return np.frombuffer(tokens, np.int32) if isinstance(tokens, array) and len(tokens) else np.array(tokens, np.int32)


def same_tokens(tokens: Ids, others: Ids) -> int:
    """Return how many first tokens both arrays `[tokens]` have in common."""
    most = min(len(tokens), len(others))
    different = np.flatnonzero(tokens[:most] != others[:most])
    return int(different[0]) if len(different) else most


def look_up(tokens: MutableSequence[int], earlier: Ids, most: int) -> tuple[list[int], int]:
    """Return at most `most` tokens that may follow `tokens`, and the length of the match that they come from.

    Both `tokens` and `earlier` answers are searched; the longer match is used.
    """
    own = ids(tokens)
    latest = own[-_LONGEST:]
    (end, length), (other_end, other) = find(own, latest), find(earlier, latest)
    if other > length:
        found = earlier[other_end : other_end + most]
        stop = np.flatnonzero(found == _END)
        return found[: stop[0] if len(stop) else most].tolist(), other
    following = own[end : end + most].tolist() if length else []
    for _ in range(most - len(following) if following else 0):  # the occurrence overlaps the end: go on periodically
        following.append(following[len(following) - (len(own) - end)])
    return following, length
