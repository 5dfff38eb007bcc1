"""Pytest plugin (`-p tests.support.native.module`) that loads `tpi.kernels._native` from TPI_NATIVE_MODULE."""

import importlib.util
import os
import sys

_spec = importlib.util.spec_from_file_location("tpi.kernels._native", os.environ["TPI_NATIVE_MODULE"])
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
sys.modules["tpi.kernels._native"] = _module

import tpi.kernels  # noqa: E402 - takes its constants from the module

setattr(tpi.kernels, "_native", _module)  # noqa: B010 - the type checker knows no such attribute
