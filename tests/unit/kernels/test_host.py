"""The host as a device: its kernels, and the numbers that they share with Python."""

import numpy as np
import pytest

from tests.support.kernels.kernel_cases import normal
from tpi.devices.host import open_host
from tpi.errors import KernelError, UsageError
from tpi.kernels import _native
from tpi.kernels.spec import NormSpec
from tpi.net import wire
from tpi.pack import layout


def test_the_environment_chooses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, x = NormSpec("rms", 1e-5, np.ones(8, np.float32)), normal(np.random.default_rng(6), 2, 8)
    default = open_host().kernels
    monkeypatch.setenv("TPI_KERNELS", "reference")
    reference = open_host().kernels
    assert reference.isa() == "numpy" != default.isa()
    np.testing.assert_allclose(default.norm(norm, x), reference.norm(norm, x), rtol=1e-5)
    monkeypatch.setenv("TPI_KERNELS", "fortran")
    with pytest.raises(UsageError, match="native, reference"):
        open_host()


def test_the_environment_forces_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _native.isa()
    monkeypatch.setenv("TPI_ISA", "scalar")
    try:
        assert open_host().kernels.isa() == "scalar"
        monkeypatch.setenv("TPI_ISA", "mmx")
        with pytest.raises(KernelError, match="this machine has"):
            open_host()
    finally:
        _native.use_isa(before)


def test_the_formats_of_packs_and_wires_are_those_of_the_kernels() -> None:
    """Files and messages contain the numbers of formats, so the kernels must use the same numbers."""
    assert layout.GROUP == wire.GROUP == _native.GROUP == _native.KV_GROUP
    assert layout.TILE_OUTPUTS == _native.TILE_OUTPUTS
