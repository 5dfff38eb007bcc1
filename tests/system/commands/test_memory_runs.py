"""Runs within `--memory` in real processes: never above it, the same tokens, and clean errors for damaged files."""

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.commands import TPI, clean
from tests.support.testbed_helpers import until
from tests.support.weights.shapes import write_huggingface
from tpi.pack.library.locate import open_model

pytestmark = pytest.mark.bare

MIB = 1 << 20
SHAPE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 384, "intermediate_size": 1536,
    "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2048,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
PROMPT = ("--raw", "-p", "a model larger than the memory that it is given " * 2, "--temp", "0", "-c", "256")
BARE = (120 * MIB, 90 * MIB)  # of the master, of a worker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 72 MB of f32 weights, in blocks of 1.6 and 7 MB."""
    return write_huggingface(tmp_path_factory.mktemp("model") / "eight-layers", SHAPE)


@pytest.fixture(scope="module")
def cache(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("cache")
    open_model(str(model), "f32", cache)
    return cache


@pytest.fixture(scope="module")
def unlimited(model: Path, cache: Path) -> dict[str, Any]:
    return run(model, cache, "--no-scheduler")


def run(model: Path, cache: Path, *flags: str) -> dict[str, Any]:
    done = subprocess.run(
        [*TPI, "run", "-m", str(model), *PROMPT, "-n", "8", "--dtype", "f32", "--json", *flags],
        capture_output=True, text=True, timeout=60, env=clean(cache), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    fields: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return fields


@pytest.mark.parametrize(("budget", "nodes"), [(28, 1), (45, 1), (22, 2)])
def test_peak_memory_stays_within_the_budget(
    model: Path, cache: Path, unlimited: dict[str, Any], budget: int, nodes: int
) -> None:
    local = ("--local", str(nodes - 1)) if nodes > 1 else ()
    fields = run(model, cache, "--memory", f"{budget}MiB", *local)
    assert fields["token_ids"] == unlimited["token_ids"]
    assert len(fields["nodes"]) == nodes
    for node in fields["nodes"]:
        assert node["bare_rss_bytes"] <= BARE[node["rank"] > 0]
        assert node["planned_bytes"] <= budget * MIB
        assert node["peak_rss_bytes"] - node["bare_rss_bytes"] <= budget * MIB
        assert 0 < node["streamed_bytes_per_token"] < 2 * node["weight_bytes"]
        assert node["steady"] is not None


def test_a_large_vocabulary_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    shape = SHAPE | {"vocab_size": 128_256, "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
    model, table = write_huggingface(tmp_path / "many-words", shape), 128_256 * 256 * 4  # bytes; the head is another
    open_model(str(model), "f32", tmp_path)
    fields, whole = run(model, tmp_path, "--memory", "32MiB"), run(model, tmp_path, "--no-scheduler")
    (node,) = fields["nodes"]
    assert fields["token_ids"] == whole["token_ids"]
    assert node["peak_rss_bytes"] - node["bare_rss_bytes"] <= 32 * MIB < table / 3
    assert node["streamed_bytes_per_token"] > 0.7 * table


def test_everything_is_kept_where_it_fits(model: Path, cache: Path, unlimited: dict[str, Any]) -> None:
    (node,) = run(model, cache, "--memory", "1GiB")["nodes"]
    (off,) = unlimited["nodes"]
    assert node["streamed_bytes_per_token"] == off["streamed_bytes_per_token"] == 0
    assert node["steady"] is None
    assert node["peak_rss_bytes"] == pytest.approx(off["peak_rss_bytes"], rel=0.05)


def test_what_cannot_fit_is_refused_in_one_sentence(model: Path, cache: Path) -> None:
    command = [*TPI, "run", "-m", str(model), *PROMPT, "--dtype", "f32", "--memory", "12MiB"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean(cache), check=False)
    assert done.returncode == 2
    assert "--memory" in sentence(done.stderr)
    assert "would do" in sentence(done.stderr)


def sentence(stderr: str) -> str:
    """Return the one line that a failed command printed, without the durations of phases."""
    (line,) = [line for line in stderr.splitlines() if not re.fullmatch(r"[\w ]+: [\d.]+ s", line)]
    return line


def warnings(stderr: str) -> list[str]:
    """Return the warnings of a command: workers that are left out, and new plans."""
    return [line for line in stderr.splitlines() if line.startswith("tpi: ")]


@contextmanager
def running(model: Path, cache: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """Start a run of many tokens; kill it and its workers at the end of the block."""
    command = [*TPI, "run", "-m", str(model), *PROMPT, "-n", "150", "--dtype", "f32", *flags]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=clean(cache), **pipes) as process:
        children: list[psutil.Process] = []
        try:
            yield process
        finally:
            if process.poll() is None:
                children = psutil.Process(process.pid).children(recursive=True)
                process.kill()
            process.communicate()
            assert not psutil.wait_procs(children, timeout=20)[1]


def break_images(cache: Path) -> list[str]:
    """Cut every image of the local worker short; return their names."""
    images = list((cache / "local" / "worker-1" / "shards").rglob("*.shard"))
    for image in images:
        with image.open("r+b") as file:
            file.truncate(8192)
    return [image.name for image in images]


def test_a_broken_file_is_named_and_its_worker_left_out(model: Path, cache: Path, unlimited: dict[str, Any]) -> None:
    flags = ("--memory", "22MiB", "--local", "1")
    with running(model, cache, *flags) as process:
        assert process.stdout
        assert process.stdout.read(1)
        names = break_images(cache)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert names
    named, _, *_ = warnings(said)  # and others that were silent, if the machine stood still
    assert "worker-1" in named
    assert any(name in named for name in names)
    assert run(model, cache, *flags)["token_ids"] == unlimited["token_ids"]


def flip_a_bit(cache: Path) -> str:
    """Change an image of the local worker without the cache noticing; return its name."""
    shards = cache / "local" / "worker-1" / "shards"
    image = max(shards.rglob("*.shard"), key=lambda path: path.stat().st_size)
    with image.open("r+b") as file:
        file.seek(image.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    known, now = json.loads((shards / "checked.json").read_text()), image.stat()
    known[image.relative_to(shards).as_posix()][1:3] = [now.st_mtime_ns, now.st_ctime_ns]
    (shards / "checked.json").write_text(json.dumps(known))
    return str(image)


def test_a_flipped_bit_is_named_and_mended_by_the_next_run(model: Path, cache: Path, unlimited: dict[str, Any]) -> None:
    flags = ("--memory", "22MiB", "--local", "1", "--verify-weights")
    sound = run(model, cache, *flags)
    assert sound["token_ids"] == unlimited["token_ids"]
    assert all(node["peak_rss_bytes"] - node["bare_rss_bytes"] <= 22 * MIB for node in sound["nodes"])
    image = flip_a_bit(cache)
    with running(model, cache, *flags) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    named, _, *_ = warnings(said)
    assert "worker-1" in named
    assert f"{image} is damaged: unit" in named
    assert run(model, cache, *flags)["token_ids"] == unlimited["token_ids"]


def packing(folder: Path) -> bool:
    """Return True while a pack is being made: its files are then in a draft."""
    return any(folder.glob("packs/*/*.safetensors*"))


def sending(folder: Path) -> bool:
    """Return True once the worker has got some of its weights."""
    return any(folder.glob("local/worker-1/shards/**/*.shard*"))


def answering(folder: Path) -> bool:
    """Return True once the answer has begun: every shard is then checked and remembered."""
    return (folder / "local" / "worker-1" / "shards" / "checked.json").exists()


@pytest.mark.parametrize("begun", [packing, sending, answering])
def test_a_killed_run_leaves_nothing_broken(
    model: Path, unlimited: dict[str, Any], tmp_path: Path, begun: Callable[[Path], bool]
) -> None:
    flags = ("--memory", "22MiB", "--local", "1")
    with running(model, tmp_path, *flags) as process:
        until(lambda: begun(tmp_path) or process.poll() is not None, 60)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert run(model, tmp_path, *flags)["token_ids"] == unlimited["token_ids"]
    open_model(str(model), "f32", tmp_path).verify()
