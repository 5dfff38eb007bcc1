"""Cards chosen by name, and the errors for cards that cannot be used. The tests need no card."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tpi.devices.choose import open_device
from tpi.devices.cuda import backend
from tpi.errors import UsageError

GIB = 1 << 30


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch report two cards with 2 GiB free each, the second of them an old one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Card {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5) if index == 0 else (7, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, 4 * GIB))


def test_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"torch .* finds no CUDA card; choose another device, or cpu"):
        open_device("cuda")


@pytest.mark.usefixtures("two_cards")
@pytest.mark.parametrize("name", ["cuda:2", "cuda:-1", "cuda:first"])
def test_a_card_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError, match=rf"no card called {name}; choose one of cuda:0 \(Card 0\), cuda:1 \(Card 1\)"):
        open_device(name)


@pytest.mark.usefixtures("two_cards")
def test_a_card_that_is_too_old() -> None:
    with pytest.raises(
        UsageError, match=r"cuda:1 \(Card 1\) has compute capability 7\.0, .* need 7\.5 .*--device opencl"
    ):
        open_device("cuda:1")


@pytest.mark.usefixtures("two_cards")
def test_more_memory_than_the_card_has_free() -> None:
    room = 2 * GIB - (256 << 20)
    with pytest.raises(UsageError, match=f"cuda:0 has {room} bytes free, not {room + 1}"):
        open_device("cuda", room + 1)


@pytest.mark.usefixtures("two_cards")
def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = importlib.util.find_spec
    monkeypatch.setattr("tpi.devices.cuda.device.find_spec", lambda name: None if name == "triton" else found(name))
    with pytest.raises(UsageError, match="need Triton; run `pip install triton`"):
        open_device("cuda")


def test_a_card_is_known_by_its_uuid_and_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    monkeypatch.setattr(backend, "_DRIVER", driver)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties",
        lambda device: SimpleNamespace(name="T4", total_memory=16, uuid=f"GPU-{device.index}", pci_bus_id=3),
    )  # fmt: skip
    driver.write_text("NVRM version: 580.1")
    first, second = backend.CudaBackend(0).identity, backend.CudaBackend(1).identity
    assert all(text in first for text in ("T4", "GPU-0", "580.1", torch.__version__))
    assert first != second
    driver.write_text("NVRM version: 590.2")
    assert backend.CudaBackend(0).identity != first
