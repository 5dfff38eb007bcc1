"""What `tpi plan --batch` says of a policy: the one that runs, and what another engine would make of the machine."""

from master.planning.batch import BatchReport
from tests.support.roofline import paper


def test_what_is_planned_runs_and_what_a_divided_cache_would_bring_is_said() -> None:
    """Where neurons come from disk, a share of the keys and values on the GPU is room in RAM for more sequences."""
    report = BatchReport.on(paper("rtx3060-laptop", 6, prompt=8000))
    assert report.forecast.policy.kv_kept in (0.0, 1.0)
    assert 0.1 < report.divided.policy.kv_kept < 0.9
    assert report.divided.rate > 1.05 * report.forecast.rate
    (said,) = (line for line in report.lines() if "the engine keeps all of them on one side" in line)
    assert f"{report.divided.rate / report.forecast.rate:.2f}x as fast" in said


def test_where_a_divided_cache_brings_nothing_it_is_not_mentioned() -> None:
    report = BatchReport.on(paper("t4", 504))
    assert report.divided.rate <= 1.01 * report.forecast.rate
    assert not [line for line in report.lines() if "on one side" in line]
