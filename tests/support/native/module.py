"""Pytest plugin (`-p tests.support.native.module`) that loads `tpi.kernels._native` from TPI_NATIVE_MODULE.

It keeps half of the cases of each test that has many: the usual build runs all of them.
"""

import importlib.util
import os
import sys
from collections import Counter
from zlib import crc32

import pytest

_MANY = 8  # cases of one test

_spec = importlib.util.spec_from_file_location("tpi.kernels._native", os.environ["TPI_NATIVE_MODULE"])
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
sys.modules["tpi.kernels._native"] = _module

import tpi.kernels  # noqa: E402 - takes its constants from the module

setattr(tpi.kernels, "_native", _module)  # noqa: B010 - the type checker knows no such attribute


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep half of the cases of each test that has many, for a sanitised build takes several times as long."""
    cases = Counter(_function(item) for item in items)
    items[:] = [item for item in items if cases[_function(item)] < _MANY or crc32(item.name.encode()) % 2]


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
