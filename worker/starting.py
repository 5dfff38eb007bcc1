"""What is found out of a node's devices when it is made, and said of them: tried, stretched, compared with figures."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tpi.devices.base import Device
from tpi.devices.failures import reason
from tpi.progress import warn

if TYPE_CHECKING:
    from tpi.devices.emulated.emulation import Emulation
    from worker.node.node import Node


def say_alone(why: Exception) -> None:
    """Say that an accelerator is left out that the user did not ask for."""
    warn(f"the graphics chip that was found is not used, and the CPU computes alone: {reason(why).partition(';')[0]}")


def try_out(node: "Node", devices: Sequence[Device]) -> None:
    """Have what was found compute one block of each kind that it is to compute; closes the node if it cannot."""
    plan = node.offload
    if plan is None or not (there := plan.kept | plan.long | plan.short):
        return
    first = {plan.pieces[number].block.kind: plan.pieces[number].block.number for number in sorted(there, reverse=True)}
    try:
        node.rehearse(sorted(first.values()))
    except Exception:
        node.close()
        raise
    say_experimental(devices)


def say_experimental(devices: Sequence[Device]) -> None:
    """Who computes on them should know."""
    names = " and ".join(device.name for device in devices)
    warn(f"{names}: experimental, such devices are tested on the CPU and have not been run on a card yet")


def settle(emulation: "Emulation", node: "Node") -> None:
    """Find out by how much the emulation must be stretched, if nobody said so, and say it."""
    if not emulation.pace.settled:
        node.rehearse()
        emulation.calibrate()
    warn(f"this node is emulated, {emulation.stretch:.0f} times as slow as what it emulates (docs/emulation.md)")


def watch(node: "Node", doubt: Callable[[], None]) -> None:
    """Compare what its tokens take with what was predicted, but for what a disk decides, which is watched apart."""
    from worker.measure.watch import StepWatch
    from worker.plan.offload import OffloadPlan

    plan = node.offload
    plain = type(plan) is OffloadPlan  # what other kinds of plan come to, other models say
    if plan is not None and plain and not node.window.placement.streamed_bytes:
        node.watch = StepWatch(plan.problem, plan.chosen, doubt)
