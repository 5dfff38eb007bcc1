"""FlexGen's policy by its published linear program (Sheng et al., 2023, section 4.3 and appendix A).

The program's unknowns are the shares of weights and of keys and values on GPU, CPU and disk; sizes of batches are
enumerated. The seconds of a kernel are its operations divided by the device's speed, regardless of the bytes that it
reads. So a small micro-batch appears to cost nothing, and saves memory. Attention runs on the GPU. There are two
differences from FlexGen: all keys and values are on one side, and the host adds residual connections, which needs fewer
transfers.
"""

from collections.abc import Iterator

import numpy as np

from scheduler.model.roofline.policy import BatchPolicy, BatchProblem

_MICRO, _PARTS = 4, (1, 2, 3, 4, 6, 8, 10, 12, 16, 20)  # gbs are multiples of 4; a block has at most 20 of them
_COMPARED = 24  # of gbs at most, evenly by their ratio
_SLOTS = 2
_WG, _WC, _WD, _CG, _CC, _CD, _PRE, _GEN = range(8)  # the unknowns


def flexgen_policy(problem: BatchProblem) -> BatchPolicy:
    """Return the policy that FlexGen's linear program finds best for `problem`.

    Raises:
        ValueError: if FlexGen's model has no solution on this machine.
    """
    found = [(value, policy) for sizes in _sizes(problem) for value, policy in _solved(problem, *sizes)]
    if not found:
        raise ValueError("FlexGen's linear program has no solution on this machine")
    return min(found, key=lambda each: each[0])[1]


def _sizes(problem: BatchProblem) -> Iterator[tuple[int, int]]:
    """Yield the size of a micro-batch (gbs), and the number of micro-batches in a batch (bls)."""
    most = problem.request.most
    steps = np.unique(np.geomspace(1, max(1, most // _MICRO), min(_COMPARED, max(1, most // _MICRO))).astype(int))
    for micro in (steps * _MICRO).tolist():
        yield from ((micro, parts) for parts in _PARTS if micro * parts <= most)


def _solved(problem: BatchProblem, micro: int, parts: int) -> Iterator[tuple[float, BatchPolicy]]:
    """Yield the seconds per sequence and the policy of FlexGen's model for one size of batch, if it has a solution."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    batch, answer, layers = micro * parts, problem.request.answer, problem.layer.layers
    objective = np.zeros(8)
    objective[_PRE], objective[_GEN] = layers, layers * (answer - 1)
    matrix, limits = _rows(problem, micro, batch)
    shares = np.zeros((2, 8))
    shares[0, [_WG, _WC, _WD]] = shares[1, [_CG, _CC, _CD]] = 1
    whole = np.zeros(8)
    whole[_CG] = 1  # all pages are on one side
    rows = [LinearConstraint(np.array(matrix), -np.inf, limits), LinearConstraint(shares, 1, 1)]
    upper = np.concatenate([np.ones(6), np.full(2, np.inf)])
    found = milp(objective, integrality=whole, bounds=Bounds(0, upper), constraints=rows)
    if found.x is not None:
        there, kv, disk = (float(found.x[at]) for at in (_WG, _CG, _WD))
        yield found.fun / batch, BatchPolicy(batch, parts, True, True, there, kv, disk, adds_there=False)


def _rows(problem: BatchProblem, micro: int, batch: int) -> tuple[list[list[float]], list[float]]:
    """Make the constraints: each lane's time is at most T_pre or T_gen, and each memory holds its contents."""
    layer, machine, request = problem.layer, problem.machine, problem.request
    device = machine.accelerator
    assert device is not None
    link, weights, prompt = device.link, layer.nbytes, request.prompt
    cache, new = batch * request.context * layer.kv_token, batch * layer.kv_token
    products = 2.0 * batch * (layer.attention_weights + layer.token_weights)
    attending = batch * request.context * layer.pair
    gen = products / device.rates.operations + attending / device.rates.operations
    pre = (products + attending / 2) * prompt / device.rates.operations
    streamed = weights / link.up
    room, kept = layer.layers * batch * request.room * layer.kv_token, layer.layers * weights
    working = _SLOTS * weights + _SLOTS * micro * request.room * layer.kv_token
    working += max(micro, problem.together[0]) * problem.needs.token
    lanes = [
        ({_WC: streamed, _WD: streamed}, _PRE, 0.0),
        ({_CC: prompt * new / link.down, _CD: prompt * new / link.down}, _PRE, 0.0),
        ({_WD: weights / machine.disk.read}, _PRE, 0.0),
        ({}, _PRE, pre),
        ({_WC: streamed, _WD: streamed, _CC: cache / link.up, _CD: cache / link.up}, _GEN, 0.0),
        ({_CC: new / link.down, _CD: new / link.down}, _GEN, 0.0),
        ({_WD: weights / machine.disk.read, _CD: cache / machine.disk.read}, _GEN, 0.0),
        ({}, _GEN, gen),
    ]
    matrix = [[terms.get(at, 0.0) - (at == of) for at in range(8)] for terms, of, _ in lanes]
    limits = [-constant for *_, constant in lanes]
    there, here = {_WG: kept - _SLOTS * weights, _CG: room}, {_WC: kept, _CC: room}
    fixed = problem.needs.fixed + problem.head.nbytes + max(batch, problem.together[1]) * problem.needs.token
    for terms, size in ((there, device.memory - working), (here, machine.memory - fixed)):
        matrix.append([terms.get(at, 0.0) / size for at in range(8)] if size > 0 else [0.0] * 8)
        limits.append(1.0 if size > 0 else -1.0)
    return matrix, limits
