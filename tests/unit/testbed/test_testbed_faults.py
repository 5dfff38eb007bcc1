"""Faults that a testbed refuses before it looks for the device."""

from pathlib import Path

import pytest

from testbed.faults import apply_fault
from tpi.errors import UsageError


def test_a_bandwidth_of_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rate 0 carries nothing"):
        apply_fault(tmp_path, "slow", "b", bandwidth=0.0)


@pytest.mark.parametrize(("action", "latency"), [("slow", None), ("cut", 0.1)])
def test_figures_belong_to_slow(tmp_path: Path, action: str, latency: float | None) -> None:
    with pytest.raises(UsageError, match="slow needs --bandwidth"):
        apply_fault(tmp_path, action, "b", latency=latency)
