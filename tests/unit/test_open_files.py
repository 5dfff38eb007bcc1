"""The errors if files cannot be opened."""

import errno
import os

import pytest

from tpi.system.fulldisk import write_error
from tpi.system.openfiles import way_to_read, way_to_write


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_the_cause_of_what_they_prevent(number: int) -> None:
    error = OSError(number, os.strerror(number))
    assert way_to_read(error, "remove the pack") == "raise the limit of open files (ulimit -n)"
    assert way_to_write(error, "set TPI_CACHE") == "raise the limit of open files (ulimit -n)"
    assert str(write_error("x", error, "set TPI_CACHE")).endswith("; raise the limit of open files (ulimit -n)")


@pytest.mark.parametrize(
    ("number", "way"),
    [
        (errno.EACCES, "give this user permission to read it"),
        (errno.ENOMEM, "free memory"),
        (errno.EIO, "remove the pack"),
    ],
)
def test_only_a_file_that_may_be_damaged_is_to_be_removed(number: int, way: str) -> None:
    assert way_to_read(OSError(number, os.strerror(number)), "remove the pack") == way
