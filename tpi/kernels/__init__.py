"""The arithmetic of a half-block. One set of functions, two implementations: `native` (C++) and `reference` (numpy).

Weights are the packed bytes of `tpi.pack`; activations are float32 `[tokens, hidden]`, C-contiguous. Arrays of the
wrong dtype, shape, alignment or contiguity raise `KernelError`. The first call chooses native unless `use` was called.
"""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Literal, Protocol, cast

from tpi.errors import KernelError, UsageError
from tpi.kernels.spec import F32, I32, U8, AttentionSpec, Batch, FfnSpec, KvArray, Residual, Stage
from tpi.pack.layout import RunLayout

Implementation = Literal["native", "reference"]
_IMPLEMENTATIONS = ("native", "reference")
_chosen: ModuleType | None = None


def use(name: str, isa: str | None = None) -> None:
    """Choose the implementation for this process and, for native, the instruction set (default: the best here).

    Raises:
        UsageError: if there is no implementation called `name`.
        KernelError: if it cannot be loaded here, or this machine lacks the instruction set.
    """
    global _chosen
    if name not in _IMPLEMENTATIONS:
        raise UsageError(f"no kernels called {name!r}; choose one of {', '.join(_IMPLEMENTATIONS)}")
    try:
        _chosen = import_module(f"tpi.kernels.{name}")
    except ImportError as error:
        raise KernelError(
            f"the native kernels cannot be loaded ({error}); install a C++ compiler and run `pip install .` again,"
            " or set TPI_KERNELS=reference to run slowly without them"
        ) from error
    if isa:
        _chosen.use_isa(isa)


def _kernels() -> ModuleType:
    if _chosen is None:
        use("native")
    return cast(ModuleType, _chosen)


def set_threads(count: int) -> None:
    """Use `count` threads, the caller's included, for every later call in this process."""
    _kernels().set_threads(count)


def threads() -> int:
    """How many threads take part in a call."""
    return cast(int, _kernels().threads())


def isa() -> str:
    """Name of the instruction set in use: avx512, avx2, neon, scalar, or numpy for the reference."""
    return cast(str, _kernels().isa())


def read(data: U8) -> None:
    """Read 1-D bytes with all threads and do nothing else: the bandwidth that the kernels are compared with."""
    _kernels().read(data)


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """`x / sqrt(mean(x^2) + eps) * weight`; `x` is `[tokens, hidden]`, `weight` `[hidden]`."""
    return cast(F32, _kernels().rms_norm(x, weight, eps))


def layer_norm(x: F32, weight: F32, bias: F32 | None, eps: float) -> F32:
    """`(x - mean) / sqrt(variance + eps) * weight + bias`; `x` is `[tokens, hidden]`, vectors `[hidden]`."""
    return cast(F32, _kernels().layer_norm(x, weight, bias, eps))


def attention(spec: AttentionSpec, data: U8, x: F32, k: KvArray, v: KvArray, batch: Batch) -> F32:
    """One node's share of an attention half-block, `[tokens, hidden]`, before the bias of o and the residual.

    `data` holds the query units, then the KV units, 1-D; `k` and `v` are one layer of `tpi.kv.PagedKV`, to which this
    step's keys and values are appended before any token of the same sequence attends.
    """
    return cast(F32, _kernels().attention(spec, data, x, k, v, batch))


def ffn(spec: FfnSpec, data: U8, x: F32, active: I32 | None = None) -> F32:
    """One node's share of a feed-forward half-block, `[tokens, hidden]`, before the bias of down and the residual.

    `active` lists the local neurons to use, each at most once (record layout only); all of them where it is None.
    """
    return cast(F32, _kernels().ffn(spec, data, x, active))


def add_residual(residual: Residual, x: F32, total: F32) -> F32:
    """`x` + the sum of all nodes' shares of a half-block; `x` and `total` are `[tokens, hidden]`."""
    return cast(F32, _kernels().add_residual(residual, x, total))


class Chain(Protocol):
    """The half-blocks of a node that has the whole model in memory, run in one call."""

    def run(self, x: F32, batch: Batch) -> F32:
        """`x`, `[tokens, hidden]`, after all half-blocks and their residual connections. Heeds Ctrl-C on the way."""
        ...


def open_chain(stages: Sequence[Stage]) -> Chain:
    """A chain of half-blocks in the order of use; their arrays are kept and must not move. Bits as one by one."""
    return cast(Chain, _kernels().Chain(stages))


def logits(run: RunLayout, data: U8, x: F32) -> F32:
    """`x` times every row of a table run, `[tokens, units * width]`; `x` is `[tokens, hidden]`, already normed."""
    return cast(F32, _kernels().logits(run, data, x))


def gather(run: RunLayout, data: U8, rows: I32) -> F32:
    """Rows of a table run, `[len(rows), hidden]` float32."""
    return cast(F32, _kernels().gather(run, data, rows))


def dequantise(run: RunLayout, data: U8, part: str) -> F32:
    """The vectors of one part of a run, `[units * width, hidden]` float32."""
    return cast(F32, _kernels().dequantise(run, data, part))
