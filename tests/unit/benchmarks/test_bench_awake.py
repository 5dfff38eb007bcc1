"""Processors that are kept from sleeping while emulated homes are measured."""

import os
import sys

import psutil
import pytest

from benchmarks.network.awake import awake

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the idle scheduling class is Linux's")


def test_each_processor_has_one_idle_process_and_none_is_left() -> None:
    before = set(psutil.Process().children())
    with awake():
        spinning = set(psutil.Process().children()) - before
        places = sorted(next(iter(os.sched_getaffinity(process.pid))) for process in spinning)
        assert places == sorted(os.sched_getaffinity(0))
        assert {os.sched_getscheduler(process.pid) for process in spinning} == {os.SCHED_IDLE}
    assert not spinning & set(psutil.Process().children())
