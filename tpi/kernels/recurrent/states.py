"""The states of a step and the convolution over time, which the reference kernels of all blocks with states share."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tpi.errors import KernelError
from tpi.kernels.arithmetic import check_range
from tpi.kernels.spec import F32, I32, LATER, Batch, HeadsSpec, RecurrentSpec


def refused(device: str) -> KernelError:
    """Return the error that says that `device` has no kernels for blocks with states."""
    return KernelError(f"{device} has no kernels for blocks with states; use --device cpu")


@dataclass(frozen=True)
class StepStates:
    """The tokens of one sequence in a step, and its states.

    Attributes:
        tokens: the sequence's rows of the step.
        read, write: the slots of the state to continue from (-1: none), and to write.
        taken: how many of the later tokens stored in `read` belong to the sequence.
        later: how many of the last of `tokens` are stored in `write` as later tokens.
    """

    tokens: slice
    read: int
    write: int
    taken: int
    later: int

    @property
    def applied(self) -> int:
        """Number of tokens that change the stored state: those taken, then the first of `tokens`."""
        return self.taken + len(range(self.tokens.start, self.tokens.stop)) - self.later


def sequences(spec: RecurrentSpec, states: F32, batch: Batch) -> Iterator[StepStates]:
    """Yield the tokens and states of each sequence of the batch.

    Raises:
        KernelError: if a slot does not exist, if `states`, one layer of `tpi.kernels.kv.States`, does not fit, or if
            the batch takes or stores more later tokens than there are.
    """
    if states.ndim != 2 or states.shape[1] != spec.state_values or states.dtype != np.float32:
        raise KernelError(f"states must be float32 [slots, {spec.state_values}], not {states.dtype} {states.shape}")
    own, rows = slots(batch), batch.sequence
    check_range("state", own[:, 1], len(states))
    check_range("state", own[:, 0] + 1, len(states) + 1)
    begins = [at for at in range(len(rows)) if not at or rows[at] != rows[at - 1]]
    for first, last in zip(begins, [*begins[1:], len(rows)], strict=False):
        read, write, taken, later = map(int, own[rows[first]])
        if not 0 <= taken <= (LATER if read >= 0 else 0) or not 0 <= later <= LATER:
            raise KernelError("a state has fewer later tokens than the step names")
        if later >= last - first:
            raise KernelError("the first token of a sequence in a step must change its state")
        yield StepStates(slice(first, last), read, write, taken, later)


def slots(batch: Batch) -> I32:
    """Return the states that each sequence of the batch reads and writes, `[sequences, 4]` (`Batch.states`).

    Raises:
        KernelError: if the batch has no states.
    """
    if batch.states is None:
        raise KernelError("a batch for recurrent layers needs the states of its sequences")
    return batch.states


def begin(states: F32, slot: int) -> F32:
    """Return a copy of the state in `slot`, or zeros for slot -1."""
    return np.zeros(states.shape[1], np.float32) if slot < 0 else states[slot].copy()


def split_state(spec: HeadsSpec, held: F32) -> tuple[F32, F32, F32]:
    """Split the stored state `held` of a sequence into its three parts, as views.

    They are the heads' states, `[heads, key, value]`; the last inputs of the convolution and those of later tokens,
    `[taps - 1 + LATER, channels]`; and the gates of later tokens, `[LATER, 2, heads]`.
    """
    size = spec.heads * spec.key * spec.value
    gates = len(held) - LATER * 2 * spec.heads
    return (
        held[:size].reshape(spec.heads, spec.key, spec.value),
        held[size:gates].reshape(spec.taps - 1 + LATER, spec.channels),
        held[gates:].reshape(LATER, 2, spec.heads),
    )


def continued(spec: HeadsSpec, states: F32, step: StepStates, projected: F32, gates: F32) -> tuple[F32, F32, F32]:
    """Store the inputs of a sequence's later tokens; return what its tokens need: those taken, then those of the step.

    Args:
        spec: the heads.
        states: one layer of `tpi.kernels.kv.States`.
        step: the sequence's tokens and states.
        projected: inputs of the convolution, `[tokens, channels]`, of all tokens of the step.
        gates: the two gates of each head, `[tokens, 2, heads]`, of all tokens of the step.

    Returns:
        The heads' states `[heads, key, value]`, a view of the slot that is written, which the first `step.applied`
        tokens are to change; the inputs of the convolution, `[taps - 1 + tokens, channels]`; the gates,
        `[tokens, 2, heads]`.
    """
    state, before, earlier = split_state(spec, begin(states, step.read))
    inputs = np.concatenate([before[: spec.taps - 1 + step.taken], projected[step.tokens]])
    all_gates = np.concatenate([earlier[: step.taken], gates[step.tokens]])
    stored, kept_inputs, kept_gates = split_state(spec, states[step.write])
    stored[:] = state
    kept_inputs[: spec.taps - 1 + step.later] = inputs[step.applied :]
    kept_gates[: step.later] = all_gates[step.applied :]
    return stored, inputs, all_gates


def convolve(inputs: F32, weights: F32) -> F32:
    """Return the causal convolution of each channel over time, `[tokens, channels]`.

    Args:
        inputs: `[taps - 1 + tokens, channels]`: those of the tokens before the step come first.
        weights: `[channels, taps]`; the last tap is the token's own.
    """
    taps = weights.shape[1]
    tokens = len(inputs) - taps + 1
    return np.asarray(sum(inputs[tap : tap + tokens] * weights[:, tap] for tap in range(taps)), np.float32)
