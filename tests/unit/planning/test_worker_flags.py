"""Flags of `tpi worker` without an effect are refused before anything is opened."""

import pytest
from click.testing import CliRunner

from tpi.errors import UsageError
from worker.commands import worker


@pytest.mark.parametrize(
    ("flags", "said"),
    [(("--memory", "0"), "--memory must not be 0"), (("--memory", "x"), "'x' is not a size")],
)
def test_what_means_nothing_is_refused(flags: tuple[str, ...], said: str) -> None:
    error = CliRunner().invoke(worker, ["--listen", "127.0.0.1:0", *flags]).exception
    assert isinstance(error, UsageError)
    assert said in str(error)
