"""The arithmetic of a block: one set of operations, `Kernels`, with two implementations.

`NativeKernels` (C++, `tpi.kernels.native`) computes; `ReferenceKernels` (numpy, `tpi.kernels.reference`) says what it
means. A device has the kernels that compute on it (`tpi.devices`), and hands them to whoever needs them.

Weights are the packed bytes of `tpi.pack`; activations are float32 `[tokens, hidden]`, C-contiguous. Arrays of the
wrong dtype, shape, alignment or contiguity raise `KernelError`.
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
    Residual,
    RouterSpec,
    Routing,
)
from tpi.pack.layout import RunLayout

IMPLEMENTATIONS = ("native", "reference")


class Chain(Protocol):
    """The blocks of a node that has the whole model in memory, run in one call."""

    def run(self, x: F32, batch: Batch, ended: I64 | None = None) -> F32:
        """`x`, `[tokens, hidden]`, after all blocks and their residual connections. Heeds Ctrl-C on the way.

        `ended`, `[blocks]`, gets how many nanoseconds after the beginning of the first block each block ended.
        """


class Kernels(Protocol):
    """What a device can compute."""

    def isa(self) -> str:
        """Name of the instruction set in use: avx512, avx2, neon_dotprod, neon, scalar, or numpy for the reference."""

    def set_threads(self, count: int) -> None:
        """Use `count` threads, the caller's included, for every later call."""

    def threads(self) -> int:
        """How many threads take part in a call."""

    def read(self, data: U8) -> None:
        """Read 1-D bytes with all threads and do nothing else: the bandwidth that the others are compared with."""

    def norm(self, norm: NormSpec, x: F32) -> F32:
        """`x` `[tokens, hidden]`, normed."""

    def prepare(self, spec: BlockSpec, x: Input, into: Prepared | None = None) -> Prepared:
        """`x` normed, and rounded if the rows of `spec` are quantised: for every segment of the block.

        What other kernels prepared is not normed again. The memory of `into`, which these kernels made, is used again.
        """

    def attention(self, spec: AttentionSpec, data: U8, x: Input, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """A segment's share of an attention block, `[tokens, hidden]`, before the bias of o and the residual.

        `data` holds the query units, then the KV units, 1-D; `keys` and `values` are one layer of `tpi.kv.KvPages`, to
        which this step's keys and values are appended before any token of the same sequence attends. The same bits as
        `project`, `attend` and `output` one after the other, and faster.
        """

    def project(self, spec: AttentionSpec, data: U8, x: Input, positions: I32) -> Projected:
        """The heads of tokens that stand at `positions`; `data` as for `attention`."""

    def attend(self, spec: AttentionSpec, projected: Projected, keys: KvArray, values: KvArray, batch: Batch) -> F32:
        """Append keys and values to the cache, then attend: `[tokens, heads * head_dim]`. Reads no weights."""

    def output(self, spec: AttentionSpec, data: U8, mixed: F32) -> F32:
        """What `attend` made, times o: `[tokens, hidden]`; `data` as for `attention`."""

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        """A segment's share of a feed-forward block, `[tokens, hidden]`, before the bias of down and the residual.

        `active` lists the local neurons to use, each at most once (record layout only); all of them where it is None.
        """

    def route(self, router: RouterSpec, x: Input) -> Routing:
        """The experts that each token chooses. Near ties may fall otherwise under another instruction set."""

    def experts(self, spec: ExpertsSpec, data: U8, x: Input, routing: Routing) -> F32:
        """A segment's share of a block of experts, `[tokens, hidden]`, before the residual: experts that no token
        chose are not read.
        """

    def expert_pieces(self, spec: ExpertsSpec, data: Mapping[int, U8], x: Input, routing: Routing) -> F32:
        """As `experts`, of some of the pieces of `spec` alone; of its shared experts if `data` has `SHARED`.

        `data` has the weights of each, by its number: they lie anywhere.
        """

    def add_residual(self, residual: Residual, x: F32, total: F32) -> F32:
        """`x` + the sum of all nodes' shares of a block; `x` and `total` are `[tokens, hidden]`."""

    def open_chain(self, blocks: Sequence[ChainBlock]) -> Chain:
        """A chain of blocks in the order of use; their arrays are kept and must not move. Bits as one by one."""

    def logits(self, run: RunLayout, data: U8, x: F32) -> F32:
        """`x` times every row of a table run, `[tokens, units * width]`; `x` is `[tokens, hidden]`, already normed."""

    def gather(self, run: RunLayout, data: U8, rows: I32) -> F32:
        """Rows of a table run, `[len(rows), hidden]` float32."""

    def dequantise(self, run: RunLayout, data: U8, part: str) -> F32:
        """The vectors of one part of a run, `[units * width, hidden]` float32."""


def open_kernels(name: str = "native", isa: str = "") -> Kernels:
    """The implementation called `name`; `isa` forces an instruction set of the native one, for the whole process.

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
