"""Blocks of experts in plain numpy: routing, and one call of a feed-forward kernel for each expert.

It defines the results of the native kernels' single call. Devices without such a call use these functions.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tpi.errors import KernelError
from tpi.kernels.arithmetic import apply_norm, check_data
from tpi.kernels.spec import (
    F32,
    I32,
    U8,
    BlockSpec,
    ExpertsSpec,
    FfnSpec,
    Input,
    NormSpec,
    Prepared,
    RouterSpec,
    Routing,
)

_PARTS = "its experts"  # key of the cached specs of its pieces in a spec's `__dict__`


class FeedForward(Protocol):
    """The kernels that the functions of this module call for each expert."""

    def prepare(self, spec: BlockSpec, x: Input, into: Prepared | None = None) -> Prepared:
        """Return the norm of a block's input `x`, rounded if weights are quantised, for all segments of the block."""

    def ffn(self, spec: FfnSpec, data: U8, x: Input, active: I32 | None = None) -> F32:
        """Return a segment's partial sum of a feed-forward block, float32 `[tokens, hidden]`."""


@dataclass(frozen=True, eq=False)
class Normed:
    """A block's input that is already normalised (`tpi.kernels.spec.Prepared`)."""

    normed: F32

    @property
    def shape(self) -> tuple[int, int]:
        """Number of tokens and hidden size: `(tokens, hidden)`."""
        tokens, hidden = self.normed.shape
        return tokens, hidden

    def values(self) -> F32:
        """Return a copy of the normed input, `[tokens, hidden]`."""
        values: F32 = self.normed.copy()
        return values


@dataclass(frozen=True, eq=False)
class _Part:
    """An expert piece as a feed-forward network of its own.

    `expert` is the expert's number, or None for the shared experts.
    """

    expert: int | None
    spec: FfnSpec
    begin: int
    end: int  # bytes of the segment's weights
    bias: F32 | None = None  # `[hidden]`, of the output


def choose(router: RouterSpec, normed: F32) -> Routing:
    """Return the experts that each token chooses (`tpi.kernels.Kernels.route`); `normed` is `[tokens, hidden]`."""
    mixture, logits = router.mixture, normed @ router.weight.T
    scores = _scores(logits if router.bias is None else logits + router.bias, mixture.scores)
    ranked = scores if router.choice is None else scores + router.choice
    experts = best(_allowed(ranked, mixture.groups, mixture.groups_used, mixture.group_best), mixture.used)
    weights = np.take_along_axis(scores, experts, axis=1)
    if mixture.normalised:
        weights = weights / weights.sum(axis=1, keepdims=True)
    weights = weights * np.float32(mixture.scale)
    if router.factors is not None:
        weights = weights * router.factors[experts]
    shared = None if router.shared is None else _sigmoid(normed @ router.shared)
    return Routing(experts.astype(np.int32), np.asarray(weights, np.float32), shared)


def normed_on_host(norm: NormSpec, x: Input) -> F32:
    """Return a block's normed input in host memory, `[tokens, hidden]`, also if a device prepared it."""
    return apply_norm(norm, x) if isinstance(x, np.ndarray) else x.values()


def best(values: F32, count: int) -> I32:
    """Return the indices of the `count` largest values of each row, the largest first.

    Of equal values, the one with the lower index comes first.
    """
    order = np.argsort(-values, axis=1, kind="stable")[:, :count]
    return np.asarray(order, np.int32)


def check_routing(spec: ExpertsSpec, routing: Routing, tokens: int) -> None:
    """Raise KernelError unless `routing` has the shape of `tokens` tokens and experts of `spec`."""
    mixture = spec.router.mixture
    shape = (tokens, mixture.used)
    if routing.experts.shape != shape or routing.weights.shape != shape:
        raise KernelError(f"a routing of {tokens} tokens must be {list(shape)}, not {list(routing.experts.shape)}")
    if routing.experts.size and not (routing.experts.min() >= 0 and routing.experts.max() < mixture.experts):
        raise KernelError(f"an expert is outside 0..{mixture.experts - 1}")


def experts_by_ffn(kernels: FeedForward, spec: ExpertsSpec, data: U8, normed: F32, routing: Routing) -> F32:
    """Compute `tpi.kernels.Kernels.experts` for the normalised input `normed`, `[tokens, hidden]`."""
    check_routing(spec, routing, len(normed))
    out: F32 = np.zeros_like(normed)
    for part in parts_of(spec):
        _add_part(kernels, out, part, data[part.begin : part.end], normed, routing)
    return out


def pieces_by_ffn(
    kernels: FeedForward, spec: ExpertsSpec, data: Mapping[int, U8], normed: F32, routing: Routing
) -> F32:
    """Compute `tpi.kernels.Kernels.expert_pieces` for the normalised input `normed`, `[tokens, hidden]`."""
    check_routing(spec, routing, len(normed))
    parts, before = parts_of(spec), int(spec.shared is not None)  # shared experts come first
    out: F32 = np.zeros_like(normed)
    for number, weights in data.items():
        if not 0 <= before + number < len(parts):
            raise KernelError(f"there is no piece {number}; this block has {len(parts) - before}, numbered from 0")
        part = parts[before + number]
        check_data(weights, part.end - part.begin)
        _add_part(kernels, out, part, weights, normed, routing)
    return out


def parts_of(spec: ExpertsSpec) -> tuple[_Part, ...]:
    """Return the shared experts and the pieces of `spec`, each with its own spec and the range of its bytes.

    They are computed once, and cached in `spec`.
    """
    parts: tuple[_Part, ...] | None = vars(spec).get(_PARTS)
    if parts is None:
        parts = vars(spec)[_PARTS] = tuple(_parts(spec))
    return parts


def weights_bytes(spec: ExpertsSpec) -> int:
    """Return the bytes of the weights of `spec`."""
    both = [spec.routed.neuron] + ([spec.shared.neuron] if spec.shared else [])
    return sum(run.units * run.unit_bytes for run in both)


def check_experts(spec: ExpertsSpec, data: U8) -> None:
    """Raise KernelError unless `data` is contiguous bytes, as many as `spec` has."""
    check_data(data, weights_bytes(spec))


def _parts(spec: ExpertsSpec) -> Iterator[_Part]:
    end = 0
    if spec.shared is not None:
        end = spec.shared.neuron.units * spec.shared.neuron.unit_bytes
        yield _Part(None, spec.shared, 0, end)
    unit, run = 0, spec.routed.neuron
    for piece in spec.pieces:
        begin, end = end, end + piece.units * run.unit_bytes
        cut = slice(unit * run.width, (unit + piece.units) * run.width)
        gate, up = (None if bias is None else bias[cut] for bias in (spec.routed.gate_bias, spec.routed.up_bias))
        own = replace(spec.routed, neuron=replace(run, units=piece.units), gate_bias=gate, up_bias=up)
        bias = spec.down_bias[piece.expert] if piece.begins and spec.down_bias is not None else None
        yield _Part(piece.expert, own, begin, end, bias)
        unit += piece.units


def _add_part(kernels: FeedForward, out: F32, part: _Part, data: U8, normed: F32, routing: Routing) -> None:
    """Add the output of a part, an expert piece, to the rows of `out` whose tokens use the part."""
    tokens, weights = _of(part, routing, len(normed))
    if len(tokens) and part.end > part.begin:
        x = kernels.prepare(part.spec, Normed(np.ascontiguousarray(normed[tokens])))
        made = kernels.ffn(part.spec, data, x)
        out[tokens] += (made if part.bias is None else made + part.bias) * weights[:, None]


def _of(part: _Part, routing: Routing, count: int) -> tuple[I32, F32]:
    """Return the tokens that use the piece `part`, and the weight of the piece's output for each of them."""
    if part.expert is None:
        shared = routing.shared
        return np.arange(count, dtype=np.int32), np.ones(count, np.float32) if shared is None else shared
    tokens, places = np.nonzero(routing.experts == part.expert)
    return tokens.astype(np.int32), routing.weights[tokens, places]


def _scores(logits: F32, kind: str) -> F32:
    if kind == "sigmoid":
        return _sigmoid(logits)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float32)


def _sigmoid(x: F32) -> F32:
    return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def _allowed(ranked: F32, groups: int, used: int, counted: int) -> F32:
    """Return the scores `ranked` with minus infinity for the experts of all groups except the best `used` ones.

    A group's score is the sum of the `counted` best scores of its experts.
    """
    if groups == used:
        return ranked
    grouped = ranked.reshape(len(ranked), groups, -1)
    worth = np.sort(grouped, axis=2)[:, :, -counted:].sum(axis=2)
    open_ = np.zeros(worth.shape, np.bool_)
    np.put_along_axis(open_, best(worth, used), True, axis=1)
    return np.asarray(np.where(open_[:, :, None], grouped, -np.inf).reshape(ranked.shape), np.float32)
