"""Checks of a new node's devices: trial runs, the calibration of an emulation, and warnings about them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tpi.devices.base import Device
from tpi.devices.failures import reason
from tpi.progress import warn

if TYPE_CHECKING:
    from tpi.devices.emulated.emulation import Emulation
    from worker.node.node import Node


def warn_left_out(why: Exception) -> None:
    """Warn that the accelerator that `auto` found is not used."""
    warn(f"the graphics chip is not used, and the CPU computes alone: {reason(why).partition(';')[0]}")


def run_trial(node: "Node", devices: Sequence[Device]) -> None:
    """Test the accelerators that `auto` found: compute one block of each kind on them.

    If a computation fails, close the node and raise the error.
    """
    plan = node.offload
    if plan is None or not (pieces := plan.resident | plan.long | plan.short):
        return
    first = {
        plan.pieces[number].block.kind: plan.pieces[number].block.number for number in sorted(pieces, reverse=True)
    }
    try:
        node.rehearse(sorted(first.values()))
    except Exception:
        node.close()
        raise
    warn_experimental(devices)


def warn_experimental(devices: Sequence[Device]) -> None:
    """Warn that the support for `devices` is experimental."""
    names = " and ".join(device.name for device in devices)
    warn(f"{names}: the support for such devices is experimental: of cards, only an NVIDIA H100 was tried")


def calibrate_emulation(emulation: "Emulation", node: "Node") -> None:
    """Measure by which factor the emulation runs slower than real time, unless the user set the factor; print it."""
    if not emulation.stretch_factor.settled:
        node.rehearse()
        emulation.calibrate()
    warn(f"this node is emulated: it runs {emulation.stretch:.0f} times slower than real time (docs/emulation.md)")


def watch(node: "Node", doubt: Callable[[], None]) -> None:
    """Compare the node's step times with the plan's prediction; call `doubt` if they contradict it.

    A node that streams weights from its disk is not compared: the disk's speed is watched separately.
    """
    from worker.measure.watch import StepWatch

    plan = node.offload
    if plan is not None and node.mode == "offload" and not node.window.placement.streamed_bytes:
        node.watch = StepWatch(plan.problem, plan.chosen, doubt)
