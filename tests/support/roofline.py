"""Batch problems for the roofline model: on small random machines, and in the paper's setting."""

from dataclasses import replace

from hypothesis import strategies as st

from scheduler.model.machine import Accelerator, DeviceLink, DiskRate, NodeMachine, Rates, emulated_node
from scheduler.model.offload.memory import Needs
from scheduler.model.offload.work import TableWork
from scheduler.model.roofline.latency import PolicyPoint, accelerator_bytes, host_bytes
from scheduler.model.roofline.layer import LayerShape
from scheduler.model.roofline.policy import BatchPolicy, BatchProblem, BatchWork, PolicyLimits
from tpi.devices.emulated.machine import parse_emulated

MIXTRAL = LayerShape(
    32,
    83.9e6,
    41.9e6,
    0,
    0,
    2818.6e6,
    1409.3e6,
    8,
    2,
    kv_token=4096,
    pair=16384,
    hidden=16384,
    heads=24576,
    mixed=16384,
)
LLAMA_HEADS = 32  # of keys and values
LLAMA = LayerShape(
    32, 134.2e6, 67.1e6, 270.5e6, 135.3e6, kv_token=16384, pair=16384, hidden=16384, heads=49152, mixed=16384
)  # Llama 2 7B in 16 bits
rates = st.floats(1, 100)


@st.composite
def problems(draw: st.DrawFn) -> BatchProblem:
    """Draw a problem: layers of some hundred bytes on a machine whose memories hold only some of the layers."""
    routed = draw(st.sampled_from([0.0, 400.0]))
    layer = LayerShape(
        draw(st.integers(2, 4)), 100, 50, 300, 150, routed, routed / 2, 4, 2,
        kv_token=draw(st.sampled_from([1.0, 8.0])), pair=16, hidden=4, heads=12, mixed=4,
    )  # fmt: skip
    whole = layer.layers * layer.nbytes
    room = st.floats(0.2, 2.5).map(lambda share: int(share * whole))
    machine = NodeMachine(
        Rates(draw(rates), 10 * draw(rates), draw(st.sampled_from([0.0, 1.0]))),
        draw(room),
        DiskRate(draw(rates)),
        Accelerator(Rates(10 * draw(rates), 1000 * draw(rates), 0.1), draw(room), DeviceLink(draw(rates), draw(rates))),
        draw(st.sampled_from([float("inf"), 50.0])),
    )
    request = BatchWork(draw(st.integers(1, 5)), draw(st.integers(1, 20)), draw(st.integers(1, 12)))
    free = PolicyLimits(kv_heads=draw(st.sampled_from([0, 1, 2, 5])))
    insisting = [replace(free, weights="ram"), replace(free, weights="disk", kv="ram"), replace(free, kv="gpu")]
    limits = draw(st.sampled_from([free, free, *insisting]))
    return BatchProblem(layer, machine, request, Needs(4, 10), 16, 32, TableWork(50, 25), limits)


def fits(problem: BatchProblem, policy: BatchPolicy, slack: float = 1e-6) -> bool:
    at, device = PolicyPoint.of(policy), problem.machine.accelerator
    assert device is not None
    here, there = float(host_bytes(problem, at)), float(accelerator_bytes(problem, at))
    return here <= problem.machine.memory * (1 + slack) and there <= device.memory * (1 + slack)


def paper(preset: str, most: int, prompt: int = 77, layer: LayerShape = MIXTRAL) -> BatchProblem:
    """Return the problem of Mixtral 8x7B in 16 bits (or `layer`) on a machine of table 2, for MTBench's answers."""
    machine = emulated_node(parse_emulated(preset))
    return BatchProblem(layer, machine, BatchWork(most, prompt, 128), Needs(400_000, 1 << 28), step=20_000)
