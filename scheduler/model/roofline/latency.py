"""The time that a layer keeps each resource busy under a policy, and its memory (MoE-Lightning, section 4.2).

The longest of these times is the layer's time (equation 12), because everything that can overlap does. A kernel takes
the time of the roofline (equations 7 and 8) and `start` for each call. All results are affine in the three shares, as a
linear program requires. All functions accept one policy or arrays of policies.
"""

from dataclasses import dataclass, replace
from math import inf

import numpy as np
import numpy.typing as npt

from scheduler.model.machine import Accelerator, Number, Rates, laptop_gpu
from scheduler.model.offload.work import RequestPhase
from scheduler.model.roofline.policy import BatchPolicy, BatchProblem, SumCost

F64 = npt.NDArray[np.float64]
_CALLS = 5  # kernel calls for a micro-batch in a layer: two norms, heads, output, neurons
_UP, _DOWN = 2, 2  # transfers of hidden states for these calls
_ADDS, _ADD_UP, _ADD_DOWN = 2, 4, 2  # calls and transfers for the residual connections of a micro-batch
_ADDED = 3  # times that a residual connection reads or writes hidden states
HOST_OVERLAP = 3  # micro-batches needed for the host to attend, two ahead, while the accelerator computes
PAGES_OVERLAP = 2  # micro-batches needed for keys and values to be copied while another micro-batch computes
_SUMS = 2  # sums over all nodes in a layer
_SLOTS = 2  # slots for layers' weights, on the accelerator and in RAM (from disk), and for micro-batches' pages


@dataclass(frozen=True)
class PolicyPoint:
    """One policy as numbers, or several as arrays of one length.

    The integer fields are 0 or 1, and the same for all policies. `divided` is 1 if the keys and values of some heads,
    but not of all, are on the accelerator, which attends with them in a call of its own.
    """

    batch: Number
    micro_batches: Number
    attention: int
    ffn: int
    weights: Number = 0.0
    kv: Number = 0.0
    disk: Number = 0.0
    adds: int = 1
    divided: int = 0

    @classmethod
    def of(cls, policy: BatchPolicy) -> "PolicyPoint":
        """Return the point of one policy."""
        return cls(
            policy.batch, policy.micro_batches, int(policy.attention_there), int(policy.ffn_there),
            policy.weights_kept, policy.kv_kept, policy.weights_on_disk, int(policy.adds_there), int(policy.divided),
        )  # fmt: skip


def roofs(problem: BatchProblem, at: PolicyPoint, phase: RequestPhase) -> dict[str, Number]:
    """Return the seconds that a layer keeps each resource busy, for one token of every sequence or for all prompts."""
    return _Layer(problem, at, phase).seconds()


def step_seconds(problem: BatchProblem, policy: BatchPolicy, phase: RequestPhase) -> float:
    """Return the seconds of all layers and the head, for one token of every sequence or for all prompts."""
    at = PolicyPoint.of(policy)
    return problem.layer.layers * float(max(roofs(problem, at, phase).values())) + head_seconds(problem, at.batch)


def head_seconds(problem: BatchProblem, batch: Number) -> float:
    """Return the seconds of the head for one token of every sequence, which overlap with nothing else."""
    head = problem.head
    return float(_roofline(problem.machine.host, head.nbytes, 2.0 * head.weights * batch)) if head.nbytes else 0.0


def without_partial_ffn(problem: BatchProblem, policy: BatchPolicy) -> BatchPolicy:
    """Return `policy`, or the policy without resident neurons if that is faster.

    If some of a layer's dense neurons are resident and others streamed, each micro-batch takes two calls, and its
    results cross the link twice. The linear program does not include this cost. So if the link has time to spare, it
    can be faster to stream all neurons and to have only attention's weights resident, or none. Experts take one call
    wherever they are stored, so the policy of a model with experts is returned unchanged.
    """
    layer, device = problem.layer, problem.machine.accelerator
    share = layer.attention_bytes / layer.nbytes if layer.nbytes else 0.0
    whole = share if policy.weights_kept >= share else 0.0
    if device is None or not policy.ffn_there or not whole < policy.weights_kept < 1 or layer.routed_bytes:
        return policy
    tokens, parts = policy.batch / policy.micro_batches, policy.micro_batches
    again = parts * (device.rates.start + device.link.latency + tokens * layer.hidden / device.link.down)
    lighter = replace(policy, weights_kept=whole)
    if float(host_bytes(problem, PolicyPoint.of(lighter))) > problem.machine.memory:
        return policy
    cut, light = (roofs(problem, PolicyPoint.of(each), "decode") for each in (policy, lighter))
    cut["accelerator"] = cut["accelerator"] + again
    return lighter if max(light.values()) < max(cut.values()) else policy


def seconds(problem: BatchProblem, policy: BatchPolicy) -> float:
    """Return the seconds of the whole batch: prompts, then the answers' tokens."""
    first = step_seconds(problem, policy, "prompt")
    return first + (problem.request.answer - 1) * step_seconds(problem, policy, "decode")


def throughput(problem: BatchProblem, policy: BatchPolicy) -> float:
    """Return the tokens generated per second, prompts included (section 5.1)."""
    return policy.batch * problem.request.answer / seconds(problem, policy)


def accelerator_bytes(problem: BatchProblem, at: PolicyPoint) -> Number:
    """Return the bytes of the accelerator's memory: resident and streamed weights, pages, and activations."""
    layer, request = problem.layer, problem.request
    if not at.attention and not at.ffn:
        return 0.0 * at.batch
    kept = at.weights * layer.nbytes
    through = _SLOTS * (_computed_bytes(problem, at) - kept)
    tokens = _micro_tokens(at)
    pages = _SLOTS * tokens * request.room * layer.kv_token * (1 - at.kv)
    pages = pages + layer.layers * at.kv * _paged_sequences(problem, at) * request.room * layer.kv_token
    activations = np.maximum(tokens, float(problem.together[0])) * problem.needs.token
    return layer.layers * kept + through + pages + activations


def host_bytes(problem: BatchProblem, at: PolicyPoint) -> Number:
    """Return the bytes of RAM: weights that are not on the accelerator or on disk, pages, activations, the head."""
    layer, request = problem.layer, problem.request
    weights = layer.layers * layer.nbytes * (1 - at.weights - at.disk) + _SLOTS * at.disk * layer.nbytes
    pages = layer.layers * _paged_sequences(problem, at) * request.room * layer.kv_token * (1 - at.kv)
    chunk, step = problem.together
    activations = np.maximum(at.batch, float(step)) * (problem.passing or problem.needs.token)
    if problem.passing:
        activations = activations + chunk * problem.needs.token
    if at.attention or at.ffn:
        pages = pages + _SLOTS * _micro_tokens(at) * request.room * layer.kv_token * (
            1 - at.kv
        )  # pages gathered for a transfer
    return weights + pages + activations + problem.needs.fixed + problem.head.nbytes


def most_weights(problem: BatchProblem, at: PolicyPoint) -> float:
    """Return the share of all weights with which the accelerator computes; at most this share may be resident."""
    return _computed_bytes(problem, at) / problem.layer.nbytes if problem.layer.nbytes else 0.0


def _computed_bytes(problem: BatchProblem, at: PolicyPoint) -> float:
    layer = problem.layer
    attention = layer.attention_bytes if at.attention or at.ffn else 0.0
    return attention + at.ffn * layer.feed_forward_bytes


def _paged_sequences(problem: BatchProblem, at: PolicyPoint) -> Number:
    held: F64 = np.maximum(at.batch, float(problem.pool))
    return held


def _micro_tokens(at: PolicyPoint) -> Number:
    tokens: F64 = np.ceil(at.batch / at.micro_batches)
    return tokens


def _roofline(rates: Rates, nbytes: Number, operations: Number) -> Number:
    found: F64 = np.maximum(nbytes / rates.read, operations / rates.operations)
    return found


class _Layer:
    """One layer in one phase: it computes `_parts` micro-batches of `_tokens` tokens each.

    Streamed weights cross the link `_passes` times. For prompts, a micro-batch is a chunk, and weights cross the link
    once for all chunks of a step. The device that computes with the weights also computes the attention of prompts.
    """

    def __init__(self, problem: BatchProblem, at: PolicyPoint, phase: RequestPhase) -> None:
        self._layer, self._machine, self._at = problem.layer, problem.machine, at
        self._device: Accelerator = problem.machine.accelerator or laptop_gpu()
        request, self._prompt = problem.request, phase == "prompt"
        self._attention = max(at.attention, at.ffn) if self._prompt else at.attention
        if self._prompt:
            self._all: Number = at.batch * request.prompt
            chunk, step = problem.together
            self._parts: Number = np.ceil(self._all / chunk)
            self._passes: Number = np.ceil(self._all / step)
            self._context, self._cached = (request.prompt + 1) / 2, 1.0
        else:
            self._all, self._parts, self._passes = at.batch, at.micro_batches, 1.0
            self._context = self._cached = request.context
        self._tokens = self._all / self._parts
        self._streamed = _computed_bytes(problem, at) - at.weights * problem.layer.nbytes
        self._sums = problem.sums

    def seconds(self) -> dict[str, Number]:
        link, layer, at = self._device.link, self._layer, self._at
        up, down = self._up(), self._down()
        read = self._passes * at.disk * layer.nbytes
        there = max(at.attention, at.ffn)
        added, waits = there * self._parts * self._adding(), self._prompt or at.attention  # nothing overlaps the adding
        found = {
            "accelerator": there * self._parts * self._accelerator() + waits * added,
            "host": self._host() + added,
            "up": up / link.up + there * 2 * self._parts * link.latency,
            "down": down / link.down + there * self._parts * link.latency,
            "disk": read / self._machine.disk.read,
        }
        if self._sums != SumCost():
            found["sums"] = _SUMS * (self._parts * self._sums.start + self._all * self._sums.token)
        found["turns"] = self._turns(found)
        if self._machine.bus < inf:
            found["bus"] = (up + down + read + self._host_reads()) / self._machine.bus
        return found

    def _turns(self, found: dict[str, Number]) -> Number:
        """Return the seconds that do not overlap with other work for lack of micro-batches; 0 if there are enough.

        With too few micro-batches, the accelerator waits for attention: for the host to attend, or for keys and values
        to arrive. Sums then overlap with neither. `found` has the seconds that each resource is busy.
        """
        at = self._at
        if self._prompt or not (at.attention or at.ffn):
            return 0.0 * self._parts
        before, least = found["host"], HOST_OVERLAP
        waits: Number = 1.0
        if at.attention:
            before, least = self._all * self._cached * self._layer.kv_token / self._device.link.up, PAGES_OVERLAP
            waits = 1 - at.kv  # attention waits only for pages that are not on the accelerator
        few = self._parts < np.minimum(least, self._all)
        if "sums" in found:
            return np.where(few, found["accelerator"] + found["sums"] + waits * before, 0.0)
        return waits * np.where(few, found["accelerator"] + before, 0.0)

    def _adding(self) -> Number:
        """Return the seconds in which the host adds a micro-batch's residual connections.

        Return 0 if the accelerator adds them.
        """
        rates, nbytes = self._machine.host, _ADDED * self._tokens * self._layer.hidden
        return (1 - self._at.adds) * _ADDS * (rates.start + nbytes / rates.read)

    def _accelerator(self) -> Number:
        """Return the accelerator's seconds for one micro-batch.

        The time includes products with weights, the accelerator's part of attention, and the transfers of hidden
        states.
        """
        layer, device, tokens = self._layer, self._device, self._tokens
        adds, routing = self._at.adds, layer.experts > 1  # one more call and transfer, for the chosen experts
        up, down, calls = _UP + adds * _ADD_UP, _DOWN + adds * _ADD_DOWN, _CALLS + adds * _ADDS + routing
        crossing = tokens * layer.hidden * (up / device.link.up + down / device.link.down)
        total = calls * device.rates.start + crossing + (up + down + routing) * device.link.latency
        total = total + _roofline(device.rates, layer.attention_bytes, 2.0 * tokens * layer.attention_weights)
        if self._at.ffn:
            total = total + self._neurons(device.rates, tokens)
        there = self._attention + (1 - self._attention) * self._at.kv  # share of attention on the accelerator
        calls = self._attention + self._at.divided
        return total + calls * device.rates.start + there * self._attending(device.rates)

    def _host(self) -> Number:
        """Return the host's seconds for the parts of all micro-batches that the accelerator does not compute."""
        rates, layer, at = self._machine.host, self._layer, self._at
        total: Number = (1 - self._attention) * self._parts * (rates.start + (1 - at.kv) * self._attending(rates))
        if not at.ffn:
            total = total + self._parts * (rates.start + self._neurons(rates, self._tokens))
        if not at.ffn and not at.attention:
            products = _roofline(rates, layer.attention_bytes, 2.0 * self._tokens * layer.attention_weights)
            total = total + self._parts * (rates.start + products)
        return total

    def _host_reads(self) -> Number:
        """Return the bytes of RAM that the host reads for computing."""
        layer, at = self._layer, self._at
        weights = (1 - at.ffn) * layer.touched(self._tokens) + (1 - max(at.ffn, at.attention)) * layer.attention_bytes
        weights = weights + (1 - at.adds) * max(at.ffn, at.attention) * _ADDS * _ADDED * self._tokens * layer.hidden
        read = layer.attended(self._cached) * layer.kv_token
        pages = (1 - self._attention) * (1 - at.kv) * self._all * read
        return self._parts * weights + pages

    def _neurons(self, rates: Rates, tokens: Number) -> Number:
        return _roofline(rates, self._layer.touched(tokens), 2.0 * tokens * self._layer.token_weights)

    def _attending(self, rates: Rates) -> Number:
        layer, tokens = self._layer, self._tokens
        nbytes = tokens * layer.attended(self._cached) * layer.kv_token
        total = _roofline(rates, nbytes, tokens * layer.attended(self._context) * layer.pair)
        if self._prompt or rates.kv is None:
            return total
        computing: F64 = np.maximum(total, rates.kv.seconds(layer.kv_dtype, nbytes, layer.sharers))
        return computing

    def _up(self) -> Number:
        """Return the bytes copied to the accelerator: streamed weights, and keys and values or attention's results."""
        at, layer = self._at, self._layer
        nbytes = self._passes * self._streamed
        if self._prompt:
            return nbytes
        if at.attention:
            return nbytes + (1 - at.kv) * self._all * self._cached * layer.kv_token
        return nbytes + max(at.attention, at.ffn) * (1 - at.kv) * self._all * layer.mixed

    def _down(self) -> Number:
        """Return the bytes copied from the accelerator: new keys and values, or heads for the host to attend with."""
        at, layer = self._at, self._layer
        if self._attention:
            return (1 - at.kv) * self._all * layer.kv_token
        return max(at.attention, at.ffn) * (1 - at.kv) * self._all * layer.heads
