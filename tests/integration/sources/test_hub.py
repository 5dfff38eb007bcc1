"""Models of the hub, with the real client: which files are fetched, downloads that resume, and errors."""

import errno
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.message import Message
from functools import partial
from pathlib import Path
from typing import TypeAlias
from urllib.error import HTTPError

import pytest

from tests.support.commands import TPI
from tests.support.fake_hub import FakeHub, Repository, fake_hub
from tests.support.models import TinyModel
from tests.support.small_disk import small_disk
from tests.support.weights.gguf_models import byte_level_vocabulary, write_gguf
from tests.support.weights.packs import quiet
from tpi.errors import ModelError, WeightsError
from tpi.pack.library import hub as hub_module
from tpi.pack.library.locate import Located, locate, open_model
from tpi.pack.library.quantisations import HouseMemory
from tpi.progress import Progress
from tpi.system.download import download

Models: TypeAlias = Callable[[str], TinyModel]
OWN = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")
UNREAD = {
    "README.md": b"words",
    "pytorch_model.bin": b"pickle" * 1000,
    "consolidated.safetensors": b"again" * 1000,
    "original/consolidated.00.pth": b"pickle" * 1000,
    "onnx/config.json": b"{}",
}


@pytest.fixture(scope="module")
def repositories(tiny_model: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Return a model as safetensors, the same in shards, and as GGUF files in two quantisations, one of them split."""
    tiny, folder = tiny_model("llama"), tmp_path_factory.mktemp("gguf")
    vocabulary = byte_level_vocabulary(tiny.directory)
    write_gguf(folder / "m-Q8_0.gguf", tiny, "llama", lambda name: "Q8_0", vocabulary=vocabulary)
    write_gguf(folder / "m-Q4_0.gguf", tiny, "llama", lambda name: "Q4_0", vocabulary=vocabulary, split=9)
    files = {file.name: file.read_bytes() for file in tiny.directory.iterdir() if file.name in OWN}
    whole = files["model.safetensors"]
    shards = {f"model-0000{number}-of-00002.safetensors": whole + bytes(number) for number in (1, 2)}
    index = json.dumps({"weight_map": {"a": min(shards), "b": max(shards)}}).encode()
    small = {name: data for name, data in files.items() if name != "model.safetensors"}
    return {
        "o/m": files | UNREAD,
        "o/shards": small | shards | {"model.safetensors.index.json": index},
        "o/m-GGUF": {file.name: file.read_bytes() for file in folder.iterdir()} | {"config.json": b"{}", "a.md": b"x"},
    }


@pytest.fixture
def hub(
    repositories: dict[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    """Run a hub that the client in this process uses, with a cache of its own."""
    from huggingface_hub import constants

    with fake_hub(repositories) as served:
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {"ENDPOINT": served.url, "HUGGINGFACE_CO_URL_TEMPLATE": template}.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # another test may have set it before the first import
        monkeypatch.setattr(hub_module, "download", partial(download, pause=lambda seconds: None))
        yield served


def found(spec: str, tmp_path: Path) -> Located:
    return locate(spec, tmp_path / "cache", quiet)


def test_only_what_is_read_is_fetched_and_only_once(hub: FakeHub, tmp_path: Path) -> None:
    located = found("o/m", tmp_path)
    assert (located.kind, located.name) == ("directory", "m")
    assert {file.name for file in located.path.rglob("*")} == set(OWN)
    assert set(hub.fetched()) == set(OWN)
    hub.requests.clear()
    assert found("o/m", tmp_path) == located
    assert hub.requests == []
    pack = open_model("o/m", "f32", tmp_path / "cache", quiet)
    assert pack.manifest.source == located.path.name or pack.path.name.startswith("m-f32-")


def test_weights_are_fetched_where_all_else_is_there_already(hub: FakeHub, tmp_path: Path) -> None:
    """Begin with a snapshot that has all files but the weights, as `tpi plan` leaves it."""
    from huggingface_hub import snapshot_download

    there = Path(snapshot_download("o/m", cache_dir=str(tmp_path / "hub"), allow_patterns=["*.json"]))
    assert not (there / "model.safetensors").exists()
    hub.requests.clear()
    assert (found("o/m", tmp_path).path / "model.safetensors").exists()
    assert hub.fetched() == ["model.safetensors"]


@pytest.mark.parametrize("there", ["*.json", "model-00001*", "*1-of-00002*"])
def test_shards_are_fetched_where_another_program_left_some(there: str, hub: FakeHub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download("o/shards", cache_dir=str(tmp_path / "hub"), allow_patterns=["*.json", there])
    assert len([*found("o/shards", tmp_path).path.glob("*.safetensors")]) == 2


def test_what_another_program_has_fetched_needs_no_hub(hub: FakeHub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    there = snapshot_download("o/shards", cache_dir=str(tmp_path / "hub"))
    hub.requests.clear()
    assert found("o/shards", tmp_path).path == Path(there)
    assert hub.requests == []


def test_a_plan_fetches_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    located = locate("o/shards", tmp_path / "cache", quiet, weights=False)
    assert {file.name for file in located.path.iterdir()} == {*OWN[1:], "model.safetensors.index.json"}
    hub.requests.clear()
    assert len([*found("o/shards", tmp_path).path.glob("*.safetensors")]) == 2
    assert set(hub.fetched()) == {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}


def test_gguf_models_by_quantisation_file_and_default(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    located = found("o/m-GGUF:Q8_0", tmp_path)
    assert (located.kind, located.path.name) == ("gguf", "m-Q8_0.gguf")
    assert hub.fetched() == ["m-Q8_0.gguf"]
    assert capsys.readouterr().err == ""
    hub.requests.clear()
    assert found("o/m-GGUF", tmp_path) == located  # the one that is there needs no choice
    assert found("o/m-GGUF:m-Q8_0.gguf", tmp_path) == located
    assert hub.requests == []


@pytest.mark.parametrize(
    ("memory", "chosen", "why"),
    [
        (1 << 30, "m-Q8_0.gguf", r"the best of 2 that fits the 1.1 GB free on 3 machines"),
        (1, "m-Q4_0-00001-of-00003.gguf", r"one of 2, though none fits the 0.0 GB free on 3 machines"),
    ],
)
def test_the_best_quantisation_that_the_house_holds(
    memory: int, chosen: str, why: str, hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    located = locate("o/m-GGUF", tmp_path / "cache", quiet, house=lambda: HouseMemory(memory, 3))
    assert located.path.name == chosen
    parts = {file.name for file in located.path.parent.iterdir()}
    assert (
        set(hub.fetched()) == parts == {name for name in hub.repositories["o/m-GGUF"].files if name[:4] == chosen[:4]}
    )
    assert re.search(rf"o/m-GGUF: using {chosen} \(0.0 GB\), {why}.*; another: o/m-GGUF:FILE", capsys.readouterr().err)
    open_model("o/m-GGUF", "auto", tmp_path / "cache", quiet)
    hub.requests.clear()
    assert locate("o/m-GGUF", tmp_path / "cache", quiet, house=lambda: HouseMemory(7 << 30)) == located
    assert hub.requests == []


def test_a_cut_transfer_goes_on_where_it_stopped(hub: FakeHub, tmp_path: Path) -> None:
    size = len(hub.repositories["o/m"].files["model.safetensors"])
    hub.cut = size // 3 + 1
    located = found("o/m", tmp_path)
    assert (located.path / "model.safetensors").stat().st_size == size
    starts = [asked for method, path, asked in hub.requests if method == "GET" and "/cdn/" in path and "model" in path]
    assert starts == [None, f"bytes={hub.cut}-", f"bytes={2 * hub.cut}-"]


def test_a_server_without_ranges_sends_all_again(hub: FakeHub, tmp_path: Path) -> None:
    leave_half(hub, tmp_path)
    hub.ranges = False
    assert whole(found("o/m", tmp_path), hub)


def leave_half(hub: FakeHub, tmp_path: Path) -> Path:
    """Leave half of the weights in the cache, as a failed download does; return the file with that half."""
    hub.cut, hub.dies = len(hub.repositories["o/m"].files["model.safetensors"]) // 2, True
    with pytest.raises(ModelError, match=r"cannot be fetched .*; check .* and run the command again to resume"):
        found("o/m", tmp_path)
    hub.cut, hub.dies, hub.dead = None, False, False
    hub.requests.clear()
    return next((tmp_path / "hub" / "models--o--m" / "blobs").glob("*.incomplete"))


def whole(located: Located, hub: FakeHub) -> bool:
    return (located.path / "model.safetensors").read_bytes() == hub.repositories["o/m"].files["model.safetensors"]


@pytest.mark.parametrize("harm", [False, True])
def test_half_of_a_file_is_gone_on_with_and_checked(harm: bool, hub: FakeHub, tmp_path: Path) -> None:
    half = leave_half(hub, tmp_path)
    size = half.stat().st_size
    if harm:
        half.write_bytes(bytes(size))
    assert whole(found("o/m", tmp_path), hub)
    asked = [start for method, path, start in hub.requests if method == "GET" and path.endswith("model.safetensors")]
    assert asked == [f"bytes={size}-", *([None] if harm else [])]


def test_the_hub_library_downloads_where_the_server_needs_it(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(url: str, *args: object, **options: object) -> None:
        raise HTTPError(url, 403, "Forbidden", Message(), None)

    monkeypatch.setattr(hub_module, "download", refused)
    assert whole(found("o/m", tmp_path), hub)


def test_a_file_that_comes_damaged_is_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.damaged.add("model.safetensors")
    assert whole(found("o/m", tmp_path), hub)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("o/mm", r"no directory o/mm, and no model of that name at http://127.*; check the name, or log in"),
        ("o/m@none", r"o/m has no revision 'none'; give a branch, a tag or a commit"),
        ("o/m-GGUF:Q9", r"no GGUF model 'Q9'; name one of its files: m-Q4_0-00001-of-00003.gguf, m-Q8_0.gguf"),
        ("o/m:Q8_0", r"o/m has no GGUF files; leave out :Q8_0"),
        ("o/gated", r"o/gated is gated: accept its conditions at http://.*/o/gated, then log in .* or set HF_TOKEN"),
        ("o/private", r"no model of that name .*, or it is private; .* or set HF_TOKEN"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(spec: str, words: str, hub: FakeHub, tmp_path: Path) -> None:
    files = hub.repositories["o/m"].files
    hub.repositories |= {"o/gated": Repository(files, gated=True), "o/private": Repository(files, private=True)}
    with pytest.raises(ModelError, match=words) as refused:
        found(spec, tmp_path)
    assert "\n" not in str(refused.value)


def test_a_token_opens_what_is_gated_or_private(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.repositories["o/locked"] = Repository(hub.repositories["o/m"].files, gated=True, private=True)
    assert found("o/locked", tmp_path).kind == "directory"


def test_a_revision_is_a_model_of_its_own(hub: FakeHub, tmp_path: Path) -> None:
    commit = hub.repositories["o/m"].commit
    assert found(f"o/m@{commit}", tmp_path).path.name == commit
    hub.repositories["o/m"].files = hub.repositories["o/m"].files | {"config.json": b'{"other": 1}'}
    assert found("o/m", tmp_path).path.name == hub.repositories["o/m"].commit != commit


def test_without_the_hub(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    located = found("o/m", tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert found("o/m", tmp_path) == located
    with pytest.raises(ModelError, match=r"o/shards is not completely in the hub's cache, and HF_HUB_OFFLINE is set"):
        found("o/shards", tmp_path)
    (located.path / "model.safetensors").resolve().unlink()
    with pytest.raises(ModelError, match=r"o/m is not completely in the hub's cache"):
        found("o/m", tmp_path)


def test_a_full_disk_is_named(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(hub_module, "download", full)
    with pytest.raises(WeightsError, match=r"disk full: cannot write the files of o/m: .*; free space or set HF_HOME"):
        found("o/m", tmp_path)


def test_a_cache_that_cannot_be_written_is_named(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(ModelError, match=r"cannot be stored in the hub's cache \(Not a directory: .*; set HF_HOME to"):
        found("o/m", tmp_path)


def test_ctrl_c_ends_a_download_at_once_and_the_next_goes_on(hub: FakeHub, tmp_path: Path) -> None:
    size = 3 << 20
    hub.repositories["o/large"] = Repository({"config.json": b"{}", "model.safetensors": os.urandom(size)})
    hub.cut, hub.stalled = size - 1, threading.Event()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "TPI_CACHE": str(tmp_path / "cache")}
    blobs = tmp_path / "home" / "hub" / "models--o--large" / "blobs"
    with subprocess.Popen([*TPI, "pull", "o/large"], env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not any(file.stat().st_size >= 2 << 20 for file in blobs.glob("*.incomplete")):
            assert process.poll() is None
            hub.stalled.wait(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr
        assert "Traceback" not in process.stderr.read()
    hub.stalled.set()
    hub.cut = None
    hub.requests.clear()
    done = subprocess.run([*TPI, "pull", "o/large"], env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip(), "model.safetensors").stat().st_size == size
    [start] = [start for method, path, start in hub.requests if method == "GET" and "/cdn/" in path]
    assert start is not None
    assert int(start.removeprefix("bytes=").rstrip("-")) >= 2 << 20


FORMS = [
    ("o/m", set(OWN)),
    ("https://huggingface.co/o/m", set(OWN)),
    ("https://huggingface.co/o/m/tree/main?not-for-all-audiences=true", set(OWN)),
    ("o/m-GGUF:q8_0", {"m-Q8_0.gguf"}),
    ("hf.co/o/m-GGUF:Q8_0", {"m-Q8_0.gguf"}),
    ("https://huggingface.co/o/m-GGUF/blob/main/m-Q8_0.gguf", {"m-Q8_0.gguf"}),
    ("https://hf.co/o/m-GGUF:Q4_0", {f"m-Q4_0-0000{part}-of-00003.gguf" for part in (1, 2, 3)}),
]


@pytest.mark.parametrize(("spec", "files"), FORMS)
def test_each_form_fetches_its_files_once(spec: str, files: set[str], hub: FakeHub, tmp_path: Path) -> None:
    found(spec, tmp_path)
    assert sorted(hub.fetched()) == sorted(files)


@pytest.mark.parametrize("spec", ["o/m", "hf.co/o/m-GGUF:Q8_0", "https://huggingface.co/o/m-GGUF:Q4_0"])
def test_ten_interruptions_fetch_no_byte_twice(spec: str, hub: FakeHub, tmp_path: Path) -> None:
    files = hub.repositories[
        spec.removeprefix("https://huggingface.co/").removeprefix("hf.co/").partition(":")[0]
    ].files
    hub.cut = sum(map(len, files.values())) // 24
    interrupted = 0
    while interrupted < 10:
        before = sum(hub.sent.values())

        @contextmanager
        def impatient(title: str, before: int = before) -> Iterator[Progress]:
            def report(done: int, total: int) -> None:
                if sum(hub.sent.values()) > before:
                    raise KeyboardInterrupt

            yield report

        with pytest.raises(KeyboardInterrupt):
            locate(spec, tmp_path / "cache", impatient)
        interrupted += 1
    located = found(spec, tmp_path)
    there = located.path if located.path.is_dir() else located.path.parent
    fetched = {file.name: file.stat().st_size for file in there.iterdir()}
    assert {name: size for name, size in hub.sent.items() if size} == fetched


def test_two_pulls_at_once_fetch_once(hub: FakeHub, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        located = [pool.submit(found, "o/m", tmp_path) for _ in range(2)]
    assert located[0].result() == located[1].result()
    assert hub.sent["model.safetensors"] == len(hub.repositories["o/m"].files["model.safetensors"])


def test_a_small_disk_is_named_before_a_byte_is_fetched(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.repositories["o/large"] = Repository({"config.json": b"{}", "model.safetensors": bytes(3 << 20)})
    with small_disk(tmp_path / "small", 2 << 20) as disk:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(disk / "hub"))
        with pytest.raises(WeightsError, match=r"disk full: o/large needs 3 MB more and .*small.* has 2 MB free; free"):
            found("o/large", tmp_path)
    assert hub.fetched() == []


@pytest.mark.parametrize("place", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "file"])
def test_a_token_is_taken_from_the_usual_places(
    place: str, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub.repositories["o/locked"] = Repository(hub.repositories["o/m"].files, gated=True, private=True)
    (tmp_path / "token").write_text(f"{hub.token}\n" if place == "file" else "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if place != "file":
        monkeypatch.setenv(place, hub.token)
    assert whole(found("o/locked", tmp_path), hub)
