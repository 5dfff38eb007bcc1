"""The arithmetic of a block: one set of operations, `Kernels`, with two implementations.

`NativeKernels` (C++, `tpi.kernels.native`) is the fast one; `ReferenceKernels` (numpy, `tpi.kernels.reference`) defines
the results. Each device has the kernels that compute on it (`tpi.devices`).

A *segment* is the units of a block that one call computes: all that a node has of the block, or some of them. The
partial sums of all segments of a block, on all nodes, add up to the block's output. Weights are the packed bytes of
`tpi.pack`; activations are float32 `[tokens, hidden]`, C-contiguous. Arrays of the wrong dtype, shape, alignment or
contiguity raise `KernelError`.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from tpi.errors import UsageError
from tpi.kernels.spec import (
    F32,
    I32,
    I64,
    U8,
    AttentionSpec,
    Batch,
    BlockSpec,
    ChainBlock,
    ExpertsSpec,
    FfnSpec,
    Input,
    KvArray,
    NormSpec,
    Prepared,
    Projected,
    RecurrentSpec,
    Residual,
    RouterSpec,
    Routing,
)
from tpi.pack.layout import RunLayout

IMPLEMENTATIONS = ("native", "reference")


class Chain(Protocol):
    """A sequence of blocks that one call computes, on a node that holds the whole model in memory."""

    def run(self, x: F32, batch: Batch, ended: I64 | None = None) -> F32:
        """Return `x`, `[tokens, hidden]`, after all blocks and their residual connections. Ctrl-C interrupts it.

        `ended`, `[blocks]`, is set to each block's end, in nanoseconds since the beginning of the first block.
        """


class Kernels(Protocol):
    """The operations that a device can compute. `tpi.kernels.spec` describes their arguments."""

    def isa(self) -> str:
        """Return the name of the instruction set in use.

        It is avx512, avx_vnni, avx2, neon_i8mm, neon_dotprod, neon or scalar. Other kernels have a name of their own,
        such as numpy.
        """

    def set_threads(self, count: int) -> None:
        """Use `count` threads, the caller's included, for every later call."""

    def threads(self) -> int:
        """Return the number of threads that take part in a call."""

    def read(self, data: U8) -> None:
        """Read the 1-D bytes `data` with all threads and compute nothing, to measure the memory's bandwidth."""

    def norm(self, norm: NormSpec, x: F32) -> F32:
        """Return the norm of the hidden states `x`, float32 `[tokens, hidden]`."""

    def prepare(self, spec: BlockSpec, x: Input, into: Prepared | None = None) -> Prepared:
        """Return the norm of a block's input `x`, rounded if the rows of `spec` are quantised. All segments use it.

        If other kernels prepared `x`, it is not normed again. `into` is an earlier result of these kernels, whose
        memory is reused.
        """

    def attention(self, spec: AttentionSpec, data: U8, x: Input, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Return a segment's partial sum of an attention block, `[tokens, hidden]`, without output bias and residual.

        `data` is 1-D and holds the query units, then the KV units. `keys` and `values` are one layer of
        `tpi.kernels.kv.KvPages`. This step's keys and values are appended to them before any token of the same sequence
        attends. The result has the same bits as `project`, `attend` and `output` in sequence, and is faster.
        """

    def project(self, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
        """Return the queries, keys and values of the tokens at `positions`; `data` is laid out as in `attention`."""

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Append keys and values to the cache, then return the attention of all heads, `[tokens, heads * head_dim]`."""

    def output(self, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """Return the output projection of `mixed`, the result of `attend`: float32 `[tokens, hidden]`."""

    def recur(self, spec: RecurrentSpec, data: U8, x: Input, states: F32, batch: Batch) -> F32:
        """Return a segment's partial sum of a block with states, `[tokens, hidden]`, before the residual.

        If the norm of the block's results is spread over nodes (`SpreadNorm`), rows with sums of squares follow. `data`
        holds the value units, then the key units if there are any. `states` is one layer of `tpi.kernels.kv.States`.
        The tokens of a sequence must be neighbours in `batch`, in order; its state after the last one is written.
        """

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        """Return a segment's partial sum of a feed-forward block, float32 `[tokens, hidden]`.

        The bias of down and the residual are not added. `active` lists the local neurons to use, each at most once
        (record layout only); None: all of them.
        """

    def route(self, router: RouterSpec, x: Input) -> Routing:
        """Return the experts that each token chooses, with their weights.

        Near ties may be decided differently by another instruction set.
        """

    def experts(self, spec: ExpertsSpec, data: U8, x: Input, routing: Routing) -> F32:
        """Return a segment's partial sum of a block of experts, `[tokens, hidden]`, before the residual.

        Experts that no token chose are not read.
        """

    def expert_pieces(self, spec: ExpertsSpec, data: Mapping[int, U8], x: Input, routing: Routing) -> F32:
        """Return the sum of the outputs of some pieces of `spec`, `[tokens, hidden]`, computed as in `experts`.

        `data` maps a piece's number to its weights, in any memory of the device; `SHARED` stands for the shared
        experts.
        """

    def add_residual(self, residual: Residual, x: F32, total: F32) -> F32:
        """Return `x` plus `total`, the sum of a block over all nodes; both are float32 `[tokens, hidden]`."""

    def open_chain(self, blocks: Sequence[ChainBlock]) -> Chain:
        """Return a chain that runs `blocks` in order, with the same bits as single calls.

        The arrays of the blocks must not move while the chain is used.
        """

    def logits(self, run: RunLayout, data: U8, x: F32) -> F32:
        """Return the products of `x` with each row of a table, float32 `[tokens, units * width]`.

        `x` is `[tokens, hidden]`, already normed.
        """

    def gather(self, run: RunLayout, data: U8, rows: I32) -> F32:
        """Return the rows of a table that `rows` lists by number, float32 `[len(rows), hidden]`."""

    def dequantise(self, run: RunLayout, data: U8, part: str) -> F32:
        """Return the part of a run called `part`, dequantised to float32 `[units * width, hidden]`."""


def open_kernels(name: str = "native", isa: str = "") -> Kernels:
    """Return the implementation called `name`; `isa` forces the native one's instruction set, for the whole process.

    Raises:
        UsageError: if there is no implementation called `name`.
        KernelError: if this machine lacks the instruction set.
    """
    if name == "native":
        from tpi.kernels.native import NativeKernels

        return NativeKernels(isa)
    if name == "reference":
        from tpi.kernels.reference import ReferenceKernels

        return ReferenceKernels()
    raise UsageError(f"no kernels called {name!r}; choose one of {', '.join(IMPLEMENTATIONS)}")
