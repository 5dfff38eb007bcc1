"""Faults on request: cut cables, slow links, frozen devices, killed processes."""

import signal
from pathlib import Path

from testbed import state
from testbed.control import ask
from testbed.processes import signal_all
from tpi.errors import TestbedError, UsageError

_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "thaw": signal.SIGCONT}


def apply_fault(
    folder: Path, action: str, device: str, bandwidth: float | None = None, latency: float | None = None
) -> str:
    """Apply the fault `action` to a device of the testbed at `folder`. Return a sentence that describes the change.

    Args:
        folder: state directory of the testbed.
        action: cut (nothing gets through), heal (undoes cut and slow), slow, kill (SIGKILL to all programs on the
            device), freeze (stops them, while their connections stay open), thaw.
        device: name of the device.
        bandwidth: for slow: bits per second that the device's links carry at most.
        latency: for slow: additional seconds each way.

    Raises:
        UsageError: for slow without figures or with a bandwidth of 0, or figures without slow.
        TestbedError: if the testbed or the device does not exist, or nothing runs on the device.
    """
    if (action == "slow") != (bandwidth is not None or latency is not None):
        raise UsageError(
            "slow needs --bandwidth or --latency, and other faults take neither: for example slow DEVICE "
            "--bandwidth '10 Mbit'"
        )
    if bandwidth == 0:
        raise UsageError("a link of rate 0 carries nothing; give a higher --bandwidth, or use `tpi testbed fault cut`")
    record = state.read(folder)
    host = record.host(device)
    if action in _SIGNALS:
        count = signal_all(record, host, _SIGNALS[action])
        if not count:
            raise TestbedError(f"nothing runs on {device}, so there is nothing to {action}")
        return f"{action}: {count} processes on {device}"
    if action == "slow":
        ask(folder, action, device=device, bandwidth=bandwidth, latency=latency or 0.0)
    else:
        ask(folder, action, device=device)
    return f"{action}: {device}"
