"""`--device` and its flags: the same answer, the messages about it, its tracks in traces, and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import listening_worker, run_json, tpi, tpi_here
from tests.support.devices.opencl_device import opencl_device
from tests.support.models import TinyModel

EMULATED = "emu:64MiB,stretch=1"
STREAMED = ("--weights", "ram", "--kv", "ram", "--crossover", "1")
PROMPT = ("-p", "a b c d e f g h i j", "--temp", "0", "-n", "5", "-c", "128")
TRACKS = {"accelerator", "weight load", "kv load", "kv save"}


@pytest.fixture
def model(tiny_model: Callable[[str], TinyModel]) -> tuple[str, ...]:
    return ("-m", str(tiny_model("llama").directory), "--dtype", "f32")


@pytest.mark.parametrize("pipeline", ["performance", "memory"])
def test_a_run_on_a_device_says_the_same_and_what_the_device_did(
    model: tuple[str, ...], pipeline: str, tmp_path: Path
) -> None:
    plain = run_json(*model, *PROMPT, cache=tmp_path)
    trace = tmp_path / "trace.json"
    flags = ("--device", EMULATED, *STREAMED, "--pipeline", pipeline, "--trace", str(trace))
    offloaded: Any = run_json(*model, *PROMPT, *flags, cache=tmp_path)
    assert offloaded["token_ids"] == plain["token_ids"]
    assert "emu holds 0 of" in offloaded["nodes"][0]["accelerator"]
    events = json.loads(trace.read_text())["traceEvents"]
    named = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    used = {event["cat"]: event["tid"] for event in events if event["ph"] == "X"}
    assert named.keys() & used.keys() >= TRACKS
    assert len({used[track] for track in TRACKS - {"kv save"}}) == len(TRACKS) - 1  # saves may have lanes of their own


def test_workers_have_devices_of_their_own(model: tuple[str, ...], tmp_path: Path) -> None:
    plain = run_json(*model, *PROMPT, cache=tmp_path)
    with listening_worker(tmp_path / "worker", "--device", EMULATED, *STREAMED) as address:
        shared: Any = run_json(*model, *PROMPT, "--workers", address, cache=tmp_path)
    assert shared["token_ids"] == plain["token_ids"]
    assert [bool(node["accelerator"]) for node in shared["nodes"]] == [False, True]


def test_local_workers_get_the_flags_too(model: tuple[str, ...], tmp_path: Path) -> None:
    shared: Any = run_json(*model, *PROMPT, "--local", "1", "--device", EMULATED, cache=tmp_path)
    assert all("emu holds" in node["accelerator"] for node in shared["nodes"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--device", "gpu"), "no device called 'gpu'; choose cpu, auto, or one of opencl, cuda, emu"),
        (("--device", "opencl:77"), "opencl"),
        (("--device", "cuda:3"), "CUDA"),
        (("--device", "emu"), "write for example emu:6GiB"),
        (("--device", "emu:lots"), "lots"),
        (("--device", "emu:1GiB,speed=2"), "speed"),
        (("--device", "emu:1GiB", "--gpu-memory", "2GiB"), "give a smaller --gpu-memory"),
        (("--device", "emu:1GiB", "--gpu-memory", "much"), "'much' is not a size"),
        (("--device", "cpu", "--kv", "gpu"), "--device cpu uses none"),
        (("--device", "cpu", "--gpu-memory", "1GiB"), "--device cpu uses none"),
        (("--pipeline", "memory"), "--pipeline is about an accelerator, and this machine has none; name one"),
        (("--gpu-memory", "1GiB"), "--gpu-memory is about an accelerator, and this machine has none"),
        (("--device", "emu:100KiB", "--weights", "gpu"), "--gpu-memory"),
        (("--device", "auto", "--device", "cuda:0"), "--device auto cannot be combined with other devices"),
        (("--device", "emu:1GiB", "--device", "opencl"), "emulated and real devices cannot be combined in one node"),
        (("--device", "emu:1GiB,name=a", "--device", "emu:2GiB,name=a"), "two emulated devices are called a"),
        (
            ("--device", "emu:1GiB", "--gpu-memory", "1MiB", "--gpu-memory", "2MiB"),
            "--gpu-memory is given 2 times and --device 1",
        ),
        (("--device", "emu:1GiB", "--device", "emu:1MiB", "--gpu-memory", "2MiB"), "give a smaller --gpu-memory"),
        (("--device", "emu:9KiB", "--device", "emu:9KiB", "--weights", "gpu"), "--gpu-memory"),
        (
            ("--device", "emu:1GiB", "--device", "emu:1GiB", "--pipeline", "batch", "--local", "2"),
            "with --pipeline batch, the 2 cards are 2 nodes; leave --local out",
        ),
        (
            ("--device", "emu:1GiB", "--device", "emu:1GiB", "--sparsity", "static", "--workers", "192.0.2.1:9"),
            "with --sparsity static, each card is a node of its own; give --device once here",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(
    flags: tuple[str, ...], said: str, model: tuple[str, ...], tmp_path: Path
) -> None:
    done = tpi_here("run", *model, *PROMPT, *flags, cache=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("tpi: ")]
    assert said in line
    assert "Traceback" not in done.stderr


def test_a_worker_with_a_device_that_is_not_there_does_not_start(tmp_path: Path) -> None:
    done = tpi("worker", "--listen", "127.0.0.1:0", "--device", "cuda:9", cache=tmp_path)
    assert done.returncode == 2
    assert "tpi: " in done.stderr
    assert "Traceback" not in done.stderr


def test_too_much_for_a_workers_card_is_refused_by_the_master(model: tuple[str, ...], tmp_path: Path) -> None:
    """The error comes before any weight is sent, with the worker's name and the way out."""
    with listening_worker(
        tmp_path / "worker", "--name", "small", "--device", "emu:100KiB", "--weights", "gpu"
    ) as address:
        done = tpi("run", *model, *PROMPT, "--workers", address, cache=tmp_path)
    assert done.returncode == 2
    assert "small: " in done.stderr
    assert "--gpu-memory" in done.stderr


def test_two_cards_of_one_node_each_with_its_memory_and_tracks(model: tuple[str, ...], tmp_path: Path) -> None:
    plain = run_json(*model, *PROMPT, cache=tmp_path)
    trace = tmp_path / "trace.json"
    cards = ("--device", EMULATED, "--device", EMULATED, "--gpu-memory", "32MiB", "--gpu-memory", "16MiB")
    shared: Any = run_json(*model, *PROMPT, *cards, *STREAMED, "--trace", str(trace), cache=tmp_path)
    assert shared["token_ids"] == plain["token_ids"]
    assert "emu holds 0, emu-2 holds 0 of" in shared["nodes"][0]["accelerator"]
    events = json.loads(trace.read_text())["traceEvents"]
    named = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert named >= TRACKS | {f"{track} on emu-2" for track in ("accelerator", "weight load")}


@pytest.mark.parametrize("pipeline", ["batch", "demand"])
def test_each_card_is_a_node_where_a_node_uses_one_card(
    pipeline: str, tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    """Batches and experts on demand take one card a node. Each node has its card, its limit and half of the host."""
    model = ("-m", str(tiny_model("qwen3moe").directory), "--dtype", "f32")
    plain = run_json(*model, *PROMPT, cache=tmp_path)
    cards = ("--device", EMULATED, "--device", "emu:48MiB,stretch=1,name=second", "--gpu-memory", "32MiB")
    apart: Any = run_json(*model, *PROMPT, *cards, "--pipeline", pipeline, cache=tmp_path)
    assert apart["token_ids"] == plain["token_ids"]
    first, second = (node["accelerator"] for node in apart["nodes"])
    assert "emu" in first
    assert "second" not in first
    assert "second" in second


def test_a_run_that_contradicts_a_measurement_repeats_it(model: tuple[str, ...], tmp_path: Path) -> None:
    with opencl_device():  # skips where there is none
        pass
    flags = (
        *model,
        "-p",
        "a b c",
        "--temp",
        "0",
        "-n",
        "14",
        "-c",
        "64",
        "--device",
        "opencl",
        "--gpu-memory",
        "16MiB",
    )
    run_json(*flags, cache=tmp_path)
    file = tmp_path / "machine.json"
    assert not any(fields["doubted"] for fields in json.loads(file.read_text()).values())  # measured by this very run
    known = json.loads(file.read_text())
    for fields in known.values():
        fields["figures"] |= {"read": 1e18, "operations": 1e18} if "read" in fields["figures"] else {}
        if "rates" in fields["figures"]:
            fields["figures"]["rates"] = {"read": 1e18, "operations": 1e18, "start": 0.0}
    file.write_text(json.dumps(known))
    run_json(*flags, cache=tmp_path)
    assert all(fields["doubted"] for fields in json.loads(file.read_text()).values())  # the next start measures


def test_an_emulated_run_that_was_too_slow_is_called_meaningless(model: tuple[str, ...], tmp_path: Path) -> None:
    done = tpi("run", *model, *PROMPT, "--device", "emu:64MiB,stretch=0.01", *STREAMED, cache=tmp_path)
    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if "the timing of this run is not valid" in line]
    assert "give stretch=" in line
