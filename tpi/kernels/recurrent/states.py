"""The states of a step and the convolution over time, which the reference kernels of all blocks with states share."""

from collections.abc import Iterator

import numpy as np

from tpi.errors import KernelError
from tpi.kernels.arithmetic import check_range
from tpi.kernels.spec import F32, I32, Batch, HeadsSpec, RecurrentSpec


def refused(device: str) -> KernelError:
    """Return the error that says that `device` has no kernels for blocks with states."""
    return KernelError(f"{device} has no kernels for blocks with states; use --device cpu")


def sequences(spec: RecurrentSpec, states: F32, batch: Batch) -> Iterator[tuple[slice, int, int]]:
    """Yield the tokens of each sequence of the batch, the slot of the state to read (-1: none), and the one to write.

    Raises:
        KernelError: if a slot does not exist, or `states`, one layer of `tpi.kernels.kv.States`, does not fit.
    """
    if states.ndim != 2 or states.shape[1] != spec.state_values or states.dtype != np.float32:
        raise KernelError(f"states must be float32 [slots, {spec.state_values}], not {states.dtype} {states.shape}")
    pairs, rows = slots(batch), batch.sequence
    check_range("state", pairs[:, 1], len(states))
    check_range("state", pairs[:, 0] + 1, len(states) + 1)
    begins = [at for at in range(len(rows)) if not at or rows[at] != rows[at - 1]]
    for first, last in zip(begins, [*begins[1:], len(rows)], strict=False):
        read, write = pairs[rows[first]]
        yield slice(first, last), int(read), int(write)


def slots(batch: Batch) -> I32:
    """Return the states that each sequence of the batch reads and writes, `[sequences, 2]`.

    Raises:
        KernelError: if the batch has no states.
    """
    if batch.states is None:
        raise KernelError("a batch for recurrent layers needs the states of its sequences")
    return batch.states


def begin(states: F32, slot: int) -> F32:
    """Return a copy of the state in `slot`, or zeros for slot -1."""
    return np.zeros(states.shape[1], np.float32) if slot < 0 else states[slot].copy()


def split_state(spec: HeadsSpec, held: F32) -> tuple[F32, F32]:
    """Split the stored state `held` of a sequence into its two parts.

    They are the heads' states, `[heads, key, value]`, and the last inputs of the convolution, `[taps - 1, channels]`.
    """
    size = spec.heads * spec.key * spec.value
    return held[:size].reshape(spec.heads, spec.key, spec.value), held[size:].reshape(spec.taps - 1, spec.channels)


def convolve(inputs: F32, weights: F32) -> F32:
    """Return the causal convolution of each channel over time, `[tokens, channels]`.

    Args:
        inputs: `[taps - 1 + tokens, channels]`: those of the tokens before the step come first.
        weights: `[channels, taps]`; the last tap is the token's own.
    """
    taps = weights.shape[1]
    tokens = len(inputs) - taps + 1
    return np.asarray(sum(inputs[tap : tap + tokens] * weights[:, tap] for tap in range(taps)), np.float32)
