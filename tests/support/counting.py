"""Work counted in calls of Python functions, which does not depend on load as seconds do."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Calls:
    """The number of calls that were counted."""

    number = 0


@contextmanager
def calls() -> Iterator[Calls]:
    """Count the calls of Python functions by this thread during the block."""
    found = Calls()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        found.number += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(before)
