"""One CUDA device for the cases of a module, and a faster version of Triton's interpreter."""

import inspect
import os
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.devices.cuda_device import open_tested
from tpi.devices.cuda.device import CudaDevice


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> None:
    """Make Triton's interpreter search its modules for builtins once, instead of in every call of a function."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    @cache
    def builtins(owner: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]

    def members(owner: Any) -> list[tuple[str, Any]]:
        """Return the builtins of a module or class that are to be replaced; all of them are replaced at once."""
        names = builtins(owner)
        if names and not tl.core.is_builtin(getattr(owner, names[0])):
            return []
        return [(name, getattr(owner, name)) for name in names]

    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": members})


@pytest.fixture(scope="module")
def device() -> Iterator[CudaDevice]:
    """The device of the module. After each case, none of its memory is in use."""
    with closing(open_tested()) as opened:
        yield opened
        assert opened.memory.used == 0
