"""Checked access to weights and pages in a card's memory."""

from tpi.devices.arena import Arena
from tpi.devices.checks import check_batch, check_caches
from tpi.devices.cuda.attention import Pages
from tpi.devices.cuda.backend import Tensor
from tpi.devices.cuda.tensors import TensorTable
from tpi.errors import KernelError
from tpi.kernels.arithmetic import check_data
from tpi.kernels.spec import U8, AttentionSpec, Batch, KvArray
from tpi.pack.layout import RunLayout, is_quantised


class CardMemory:
    """Access to arrays of a card's arena as tensors, after the checks that kernels rely on."""

    def __init__(self, memory: Arena, names: TensorTable) -> None:
        self._memory = memory
        self._names = names

    def bytes(self, what: str, array: KvArray) -> Tensor:
        """Return the tensor of a contiguous array.

        Raise DeviceError, which names it `what`, if it is not in the arena.
        """
        self._memory.check(what, array)
        return self._names.tensor(array)

    def weights(self, run: RunLayout, data: U8) -> Tensor:
        """Return the bytes of all units of a run; raise KernelError if they are too few, too many, or not aligned."""
        check_data(data, run.units * run.unit_bytes)
        check_aligned(run, data.ctypes.data)
        return self.bytes("weights", data)

    def runs(self, spec: AttentionSpec, data: U8) -> tuple[Tensor, Tensor]:
        """Return the bytes of the query units and of the KV units."""
        split = spec.query.units * spec.query.unit_bytes
        check_data(data, split + spec.kv.units * spec.kv.unit_bytes)
        return self.weights(spec.query, data[:split]), self.weights(spec.kv, data[split:])

    def pages(self, spec: AttentionSpec, keys: KvArray, values: KvArray, batch: Batch) -> Pages:
        """Return keys and values of one layer; raise KernelError if their pages do not suffice for `batch`."""
        check_batch(batch, len(keys))
        return self.opened(spec, keys, values)

    def opened(self, spec: AttentionSpec, keys: KvArray, values: KvArray) -> Pages:
        """Return keys and values of one layer; raise KernelError if their format, shape or head size is wrong."""
        format = check_caches(spec, keys, values)
        if format == "q8" and spec.head_dim % 2:
            raise KernelError(f"q8 keys and values need heads of even size on a card, not of {spec.head_dim}")
        return Pages(format, self.bytes("the caches", keys), self.bytes("the caches", values))


def check_aligned(run: RunLayout, address: int) -> None:
    """Raise KernelError unless floats and words of codes are aligned to their size, and other scales to 2 bytes."""
    for part in run.parts:
        size = 4 if part.format == "f32" or run.layout == "tiled" else 2
        stride = run.unit_bytes if run.layout == "tiled" else run.record_bytes
        if (address | run.part_offset(part.name) | stride) % size:
            what = "scales" if is_quantised(part.format) else part.format
            raise KernelError(f"weights of {part.name} are not aligned to {size} bytes, as {what} must be")
