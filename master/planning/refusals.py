"""Refusal of flags of `tpi plan` that a run would refuse, or that would have no effect."""

from typing import Any

from scheduler.model.machine import NodeMachine
from tpi.errors import UsageError

_OF_ACCELERATORS = ("weights", "kv", "pipeline")


def refuse_pipeline(pipeline: str, batch: int) -> None:
    """Refuse a pipeline that would have no effect.

    Raises:
        UsageError: if `batch` is more than 1 and the pipeline is for single requests.
    """
    if batch > 1 and pipeline not in ("auto", "batch"):
        raise UsageError(
            f"--pipeline {pipeline} is for one request at a time, but --batch {batch} plans for many at once; "
            "leave one of them out"
        )


def refuse_idle(machine: NodeMachine, flags: dict[str, Any]) -> None:
    """Refuse a flag that has no effect on this machine, as `tpi run` does.

    Raises:
        UsageError: naming the flag.
    """
    given = [name for name in _OF_ACCELERATORS if flags[name] != "auto"]
    if given and not machine.cards:
        raise UsageError(
            f"--{given[0]} is for an accelerator, and this node has none; name one with --device or --machine, or "
            "leave the flag out"
        )
    described = flags["machine"] or (flags["device"] and all(name.startswith("emu") for name in flags["device"]))
    if flags["remeasure"] and described:
        raise UsageError("--remeasure measures this machine, and the plan is for one that is described; leave it out")
