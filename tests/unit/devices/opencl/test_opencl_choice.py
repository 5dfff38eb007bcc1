"""The choice of the OpenCL device, and the errors without one."""

import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace

import pytest

from tests.support.devices.opencl_device import opencl_device
from tpi.devices.choose import open_device
from tpi.devices.opencl import discover, programs
from tpi.devices.opencl.device import OpenClDevice
from tpi.errors import KernelError, UsageError


def test_by_its_index_or_without(card: OpenClDevice) -> None:
    with closing(open_device("opencl:0", 1 << 20)) as device:
        assert device.name.startswith("opencl:0 (")
        assert device.memory.limit == 1 << 20
    assert card.name == device.name
    assert card.memory.limit is not None
    assert card.memory.limit > 1 << 26


@pytest.mark.parametrize("argument", ["99", "x", "-1", "0:1"])
def test_one_that_is_not_there(card: OpenClDevice, argument: str) -> None:
    with pytest.raises(UsageError, match=rf"no device opencl:{argument}; choose one of opencl:0 \("):
        open_device(f"opencl:{argument}")


def test_more_memory_than_the_card_has(card: OpenClDevice) -> None:
    with pytest.raises(UsageError, match=r"opencl:0 .* has \d+ bytes of memory, not"):
        open_device("opencl", 1 << 60)


def test_no_pyopencl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    with pytest.raises(UsageError, match=r"pip install 'tpi\[opencl\]'"):
        open_device("opencl")


def test_no_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "find_devices", list)
    with pytest.raises(UsageError, match="no OpenCL device was found"):
        open_device("opencl")


def test_a_gpu_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with opencl_device(1 << 20):
        import pyopencl as cl

    devices = [SimpleNamespace(type=kind) for kind in (cl.device_type.CPU, cl.device_type.GPU, cl.device_type.GPU)]
    monkeypatch.setattr(discover, "find_devices", lambda: devices)
    assert discover.choose_device("") == (1, devices[1])
    monkeypatch.setattr(discover, "find_devices", lambda: devices[:1])
    assert discover.choose_device("") == (0, devices[0])


def described(**others: object) -> SimpleNamespace:
    """Return a device as a driver describes it."""
    known = {"name": "GPU", "vendor": "V", "version": "OpenCL 3.0", "driver_version": "31", "max_compute_units": 8,
             "global_mem_size": 1 << 33, "handle": object()}  # fmt: skip
    return SimpleNamespace(**{**known, **others})


def test_a_device_is_identified_by_place_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia = described(name="NV", pci_domain_id_nv=0, pci_bus_id_nv=3, pci_slot_id_nv=0)
    amd = described(name="AMD", topology_amd=SimpleNamespace(bus=5, device=0, function=1))
    first, second = described(), described()
    monkeypatch.setattr(discover, "find_devices", lambda: [first, nvidia, second, amd])
    known = [
        discover.identity(each) for each in (nvidia, amd, first, second, described(driver_version="32", uuid_khr=b"7"))
    ]
    assert len(set(known)) == len(known)
    assert "pci_bus_id_nv 3" in known[0]
    assert "topology_amd 5:0:1" in known[1]
    assert known[3].endswith("number 1")
    assert "32" in known[4]
    assert known[4].endswith("37")
    monkeypatch.setattr(discover, "find_devices", lambda: [amd, second, nvidia, first])
    assert discover.identity(nvidia) == known[0]


def test_its_identity_names_the_driver(card: OpenClDevice) -> None:
    assert card._card.device.driver_version in card.identity


def test_the_module_that_opens_it_is_light() -> None:
    code = "import sys, tpi.devices.choose, tpi.devices.opencl.device as d; print('pyopencl' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


LOG = "clBuildProgram failed\n\nBuild on <PoCL>:\n\n"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("error: unknown target CPU 'generic'", r"older than the machine's processor .*apt install pocl-opencl-icd"),
        ("1:1: error: what is this?", r"refuses .*norms.*: clBuildProgram failed Build on <PoCL>: 1:1: error"),
    ],
)
def test_a_compiler_that_takes_no_program_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, log: str, said: str
) -> None:
    """PoCL refuses all programs on a processor that is newer than its LLVM."""

    class Refused(Exception):
        pass

    def build(*_: object) -> None:
        raise Refused(LOG + log)

    able = SimpleNamespace(CORRECTLY_ROUNDED_DIVIDE_SQRT=128)
    driver = SimpleNamespace(
        Error=Refused, Kernel=None, Program=lambda *_: SimpleNamespace(build=build), device_fp_config=able
    )
    monkeypatch.setattr(programs, "opencl", lambda: driver)
    context = SimpleNamespace(devices=[SimpleNamespace(single_fp_config=0)])
    with pytest.raises(KernelError, match=said) as refused:
        programs.Programs(context).kernel(programs.Program(("norms",)), "norm")
    assert "\n" not in str(refused.value)
