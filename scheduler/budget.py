"""The division of `--memory`, all bytes that a node may use above its bare process, before anything is loaded.

Memory is given out in this order:

1. small vectors, the activations of one token, and the buffers of collectives;
2. pages for the requested context;
3. the activations of a prefill step, which is as long as memory allows;
4. the head, if the blocks can still be streamed in what is left;
5. resident blocks, and a ring for the others;
6. the embedding, if all blocks are resident.

If the needs do not fit, the error names the smallest budget and the longest context that would. `scheduler.free` sets
the budget when the user gives none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.model.placement import Placement, Speeds, place, place_window
from scheduler.model.ring import neighbours
from scheduler.model.sizes import LONGEST_CHUNK, TILE
from tpi.devices.pages import PAGE, round_up
from tpi.errors import PlanError
from tpi.kernels.constants import PAGE_TOKENS
from tpi.pack.layout import BlockKind

_AMPLE_CHUNK = 256  # tokens: longer steps save passes over the streamed weights, but compute hardly faster
_SHORT_CHUNK = 32  # tokens: a prefill step is shorter than this only if the weights would not fit otherwise
_CHUNK_SHARE = 8  # a chunk takes at most an eighth of the memory it shares with weights, or of the streamed bytes
_STEPS = 8  # until the head fits, the budget grows by one part in so many of the head's missing bytes
PROCESS = 7 << 20  # bytes that a process takes once it works: code, sockets, plans, hashes


@dataclass(frozen=True)
class MemoryNeed:
    """Memory needs of one node, in bytes except for `pages`."""

    blocks: tuple[int, ...]  # each block or tile, in order of use (`Extent.slot_bytes`)
    page_bytes: int  # one page of this node's heads, all layers (`tpi.kernels.kv.page_bytes`)
    pages: int  # the requested context, in pages
    token: int  # activations of one token of a step (`worker.plan.fit.token_bytes`)
    fixed: int = 0  # vectors, and buffers that do not grow with a step
    head: int = 0  # the head's table; 0 on workers
    embedding: int = 0  # the embedding's table; 0 on workers, and if it is the head's table too
    kinds: tuple[BlockKind, ...] | None = None  # the kind of each block; None: `scheduler.model.placement.kinds_of`

    @property
    def table_tiles(self) -> int:
        """Bytes for two tiles of the head and one of the embedding, when both tables are read from disk."""
        return min(2 * TILE, round_up(self.head)) + min(TILE, round_up(self.embedding))


@dataclass(frozen=True)
class Budget:
    """A node's memory as divided: sizes in bytes, `chunk` in tokens."""

    total: int
    fixed: int
    pages: int
    kv_bytes: int
    chunk: int
    chunk_bytes: int
    head_bytes: int  # the head's whole table, or the tiles of `master.vocabulary.streamed`
    embedding_bytes: int
    placement: Placement
    demand_bytes: int = 0  # cache of units that are read only when a step needs them

    @property
    def used(self) -> int:
        """Bytes that the node will use above its bare process: the predicted peak (TPI-LLM, proposition 5)."""
        other = self.fixed + self.kv_bytes + self.chunk_bytes + self.head_bytes + self.embedding_bytes
        return other + self.placement.memory_bytes + self.demand_bytes


def plan_budget(
    need: MemoryNeed,
    total: int,
    chunk: int = LONGEST_CHUNK,
    window: int = 0,
    retain: int = 0,
    speeds: Speeds | None = None,
) -> Budget:
    """Divide `total` bytes among the needs of a node.

    Args:
        need: the node's memory needs.
        total: bytes that the node may use.
        chunk: the longest prefill step, in tokens; it never exceeds the context.
        window, retain: if `window` is not 0, the paper's placement (`scheduler.model.placement.place_window`) instead
            of the fastest that fits.
        speeds: the speeds to choose a placement for; None: a laptop's.

    Raises:
        PlanError: if the needs do not fit; the message names the smallest budget and the longest context that would.
    """
    if need.pages * need.page_bytes + minimum_bytes(need, window, retain) > total:
        raise _refusal(need, total, window, retain)
    chunk, head, room = _shares(need, total, chunk, window, retain)
    tiles = min(TILE, round_up(need.embedding))
    placement = _placed(need.blocks, room, need.kinds, window, retain, speeds)
    spare = room + tiles - placement.memory_bytes
    keep_embedding = not placement.streamed_bytes and round_up(need.embedding) <= spare
    return Budget(
        total=total,
        fixed=need.fixed,
        pages=need.pages,
        kv_bytes=need.pages * need.page_bytes,
        chunk=chunk,
        chunk_bytes=chunk * need.token,
        head_bytes=head,
        embedding_bytes=round_up(need.embedding) if keep_embedding else tiles,
        placement=placement,
    )


def minimum_bytes(need: MemoryNeed, window: int = 0, retain: int = 0) -> int:
    """Return the smallest budget, in bytes, without a KV cache: one token a step, one block in memory at a time."""
    return need.fixed + need.token + need.table_tiles + _least_weights(need, window, retain)[0]


def sufficient_budget(need: MemoryNeed, weights: int, chunk: int = LONGEST_CHUNK) -> int:
    """Return a budget, in whole MiB, that is close to the smallest with which blocks get `weights` bytes.

    `plan_budget` may give added memory to the head or to longer prefill steps first. So the budget is raised in steps
    until the blocks get `weights` bytes.
    """
    total = _whole_mib(minimum_bytes(need) + need.pages * need.page_bytes)
    while (room := _shares(need, total, chunk, 0, 0)[2]) < weights:
        total = _whole_mib(total + weights - room)
    return total


def window_budget(need: MemoryNeed, window: int, retain: int, chunk: int = LONGEST_CHUNK) -> int:
    """Return a budget, in whole MiB, close to the smallest that holds the whole head and the paper's placement.

    `window` and `retain` describe the placement, as in `plan_budget`.
    """
    total = _whole_mib(minimum_bytes(need, window, retain) + need.pages * need.page_bytes)
    while (head := _shares(need, total, chunk, window, retain)[1]) < round_up(need.head):
        total += max(1 << 20, _whole_mib((round_up(need.head) - head) // _STEPS))
    return total


def budget_with_head(need: MemoryNeed, weights: int, chunk: int = LONGEST_CHUNK) -> int:
    """Return a budget, in whole MiB, close to the smallest that holds the whole head and leaves `weights` bytes for
    blocks.

    If `weights` is the size of all blocks, the budget includes the embedding.
    """
    total = sufficient_budget(need, weights, chunk)
    while (shares := _shares(need, total, chunk, 0, 0))[1] < round_up(need.head) or shares[2] < weights:
        total += max(1 << 20, _whole_mib((round_up(need.head) - shares[1]) // _STEPS))
    return total + (round_up(need.embedding) if weights >= sum(need.blocks) else 0)


def affordable_pages(need: MemoryNeed, total: int, window: int = 0, retain: int = 0) -> int:
    """Return how many pages fit into `total` bytes if all other needs get their minimum.

    Return 0 if the minimums do not fit.
    """
    room = total - minimum_bytes(need, window, retain)
    return max(0, room // need.page_bytes) if need.page_bytes else need.pages


def _shares(need: MemoryNeed, total: int, chunk: int, window: int, retain: int) -> tuple[int, int, int]:
    """Return the tokens of a prefill step, the bytes for the head, and the bytes left for blocks.

    The arguments are those of `plan_budget`.
    """
    chunk = min(chunk, need.pages * PAGE_TOKENS)
    left = total - need.fixed - need.pages * need.page_bytes
    weights = _least_weights(need, window, retain)
    chunk = _chunk(need, left - need.table_tiles, weights, chunk, 0 if window else sum(need.blocks) + need.head)
    left -= chunk * need.token
    head = _head(need, left, weights)
    return chunk, head, left - head - min(TILE, round_up(need.embedding))


def _least_weights(need: MemoryNeed, window: int, retain: int) -> tuple[int, int]:
    """Return two sizes of memory for weights, in bytes: the least that can run, and the least that loads while
    computing.
    """
    if window:
        needed = place_window(need.blocks, window, retain, need.kinds).memory_bytes
        return needed, needed
    return max(need.blocks, default=0), min(sum(need.blocks), neighbours(need.blocks, 2)) if need.blocks else 0


def _chunk(need: MemoryNeed, left: int, weights: tuple[int, int], longest: int, everything: int) -> int:
    """Return the most tokens of a prefill step: `longest`, halved until activations and weights fit into `left` bytes.

    Activations take memory from resident weights, so each of their bytes is one more byte to stream for every token.
    Therefore a step is longer than `_AMPLE_CHUNK` only if its activations are few compared with the bytes that are
    streamed anyway.

    Args:
        need: the node's needs.
        left: bytes for activations and weights together.
        weights: the two sizes that `_least_weights` returns.
        longest: the most tokens of a step.
        everything: bytes of all weights that could be resident; 0 if the placement is given by a window.
    """
    chunk = max(1, longest)
    while chunk > 1:
        size = chunk * need.token
        streamed = everything - (left - size)
        worth = chunk <= _AMPLE_CHUNK or streamed <= 0 or size <= streamed // _CHUNK_SHARE
        modest = worth and size <= left // _CHUNK_SHARE and size + weights[1] <= left
        if modest or (chunk <= _SHORT_CHUNK and size + weights[0] <= left):
            break
        chunk //= 2
    return chunk


def _head(need: MemoryNeed, left: int, weights: tuple[int, int]) -> int:
    """Return the bytes for the head: its size if blocks can still be streamed in the rest of `left`, else two tiles of
    it.

    The whole head has priority over resident blocks, because loading it cannot overlap with computing.
    """
    whole = round_up(need.head)
    if whole + weights[1] + min(TILE, round_up(need.embedding)) <= left:
        return whole
    return min(2 * TILE, whole)


def _placed(
    blocks: Sequence[int],
    room: int,
    kinds: Sequence[BlockKind] | None,
    window: int,
    retain: int,
    speeds: Speeds | None,
) -> Placement:
    if window:
        return place_window(blocks, window, retain, kinds)
    return place(blocks, room // PAGE * PAGE, speeds)


def _refusal(need: MemoryNeed, total: int, window: int, retain: int) -> PlanError:
    smallest = round_up(minimum_bytes(need, window, retain) + need.pages * need.page_bytes)
    fitting = PAGE_TOKENS * affordable_pages(need, total, window, retain)
    context = f"a context of {fitting} tokens would fit" if fitting else "no context would fit"
    enough = f"--memory {_mib(smallest, up=True)} would do"
    return PlanError(
        f"{_mib(total)} of memory is too little for this part of the model: {enough}; at {_mib(total)} {context}",
        context=fitting,
    )


def _whole_mib(size: int) -> int:
    return -(-size >> 20) << 20


def _mib(size: int, up: bool = False) -> str:
    return f"{-(-size >> 20) if up else size >> 20}MiB"
