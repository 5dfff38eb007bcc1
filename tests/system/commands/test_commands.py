"""The commands in real processes: answers, tables, JSON, and wrong uses."""

import json
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import psutil
import pytest

from tests.support.commands import TPI, clean, listening_worker, run_json, tpi, tpi_here
from tests.support.models import TinyModel
from tpi import __version__

NODE_FIELDS = {
    "name", "rank", "heads", "kv_heads", "neurons",
    "weight_bytes", "resident_bytes", "bare_rss_bytes", "planned_bytes", "peak_rss_bytes",
    "layers", "compute_ms_per_token", "sync_ms_per_token", "hop_ms_per_token", "io_stall_ms_per_token",
    "streamed_bytes_per_token", "disk_mb_per_s",
    "sent_bytes_per_token", "received_bytes_per_token", "steady", "accelerator",
}  # fmt: skip
RUN_FIELDS = {
    "text", "token_ids", "prompt_tokens", "completion_tokens", "ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s",
    "finish_reason", "collective", "prefill_collective", "wire", "predicted_sync_ms", "choice", "nodes",
    "weights_sent_bytes", "drafted_tokens", "accepted_tokens",
}  # fmt: skip


def test_run_over_three_local_nodes_as_json(model: str, cache: Path) -> None:
    flags = ("-m", model, "-p", "Hello", "-n", "8", "--temp", "0")
    alone = run_json(*flags, cache=cache)
    shared = run_json(*flags, "--local", "2", cache=cache)
    assert alone.keys() == shared.keys() == RUN_FIELDS
    assert alone["token_ids"] == shared["token_ids"]
    nodes = shared["nodes"]
    assert isinstance(nodes, list)
    assert [node.keys() for node in nodes] == [NODE_FIELDS] * 3
    assert [node["heads"] for node in nodes] == [[0, 2], [2, 4], [4, 6]]
    assert all(node["sent_bytes_per_token"] > 0 for node in nodes)


def test_workers_by_flag_or_environment_and_two_clusters(model: str, cache: Path, tmp_path: Path) -> None:
    flags = ("-m", model, "-p", "Hello", "-n", "6", "--temp", "0")
    with listening_worker(tmp_path / "a") as first, listening_worker(tmp_path / "b") as second:
        command = [*TPI, "run", *flags, "--local", "1", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean(cache)) as other:
            named = run_json(*flags, "--workers", f"{first},{second}", "--split", "3,2,1", cache=cache)
            out, _ = other.communicate(timeout=100)
        again = run_json(*flags, cache=cache, TPI_WORKERS=f"{first},{second}")
    assert named["token_ids"] == again["token_ids"] == json.loads(out.splitlines()[-1])["token_ids"]
    nodes = named["nodes"]
    assert isinstance(nodes, list)
    assert [node["heads"] for node in nodes] == [[0, 3], [3, 5], [5, 6]]


def test_bench_gives_medians_without_text(model: str, cache: Path) -> None:
    done = tpi(
        "bench", "-m", model, "--prompt-tokens", "16", "--gen-tokens", "8", "--repeat", "2", "--json", cache=cache
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert RUN_FIELDS - figures.keys() == {"text", "token_ids", "finish_reason"}
    assert figures["completion_tokens"] == 8
    assert figures["decode_tokens_per_s"] > 0


def test_chat_keeps_earlier_turns(model: str, cache: Path) -> None:
    done = subprocess.run(
        [*TPI, "chat", "-m", model, "-n", "4", "--temp", "0"],
        input="one\ntwo\n", capture_output=True, text=True, timeout=100, env=clean(cache), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_stop_text_ends_the_answer(model: str, cache: Path) -> None:
    flags = ("-m", model, "-p", "Hello", "-n", "12", "--temp", "0", "--raw")
    text = str(run_json(*flags, cache=cache)["text"])
    stop = text[2:4]
    stopped = run_json(*flags, "--stop", stop, cache=cache)
    assert stopped["text"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("said", "flags", "note"),
    [
        ({"do_sample": False, "temperature": 0.6}, (), "greedy (temperature 0); --temp overrides it"),
        ({"temperature": "0.6"}, ("--temp", "0"), "the model's temperature of '0.6' is not used: it is not a number"),
        ({"temperature": 90}, ("--temp", "0"), ""),
    ],
)
def test_a_model_says_how_it_is_sampled(
    said: dict[str, object], flags: tuple[str, ...], note: str, model: str, cache: Path, tmp_path: Path
) -> None:
    greedy = run_json("-m", model, "-p", "Hello", "-n", "8", "--temp", "0", cache=cache)
    changed = copytree(model, tmp_path / "changed")
    (changed / "generation_config.json").write_text(json.dumps(said))
    done = tpi("run", str(changed), "Hello", "-n", "8", "--json", *flags, cache=cache)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == greedy["token_ids"]
    assert note in done.stderr
    assert done.stderr.count("the model's") == bool(note)


def test_version(cache: Path) -> None:
    assert tpi("version", cache=cache).stdout.strip() == __version__


WRONG: dict[str, tuple[list[str], str]] = {
    "unknown model": (["-m", "no-such-model"], "no-such-model"),
    "bad size": (["--memory", "lots"], "'lots' is not a size"),
    "bad split": (["--local", "1", "--split", "1"], "1 shares for 2 nodes"),
    "bad address": (["--workers", "nowhere"], "not HOST:PORT"),
    "same worker twice": (["--workers", "a:1,a:1"], "given twice"),
    "both kinds of workers": (["--local", "1", "--workers", "a:1"], "exclude each other"),
    "more nodes than units": (["--local", "6"], "too few for 7 nodes"),
    "prompt over the context": (["-c", "4", "-p", "x" * 50], "over the context of 4"),
    "temperature": (["--temp", "-1"], "--temp -1.0 is out of range"),
    "unknown dtype": (["--dtype", "f17"], "f17"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_sentence_and_exit_code_2(case: str, model: str, cache: Path) -> None:
    arguments, says = WRONG[case]
    done = tpi_here("run", "-m", model, "-p", "Hi", *arguments, cache=cache)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_unreachable_worker_says_how_to_start_one(model: str, cache: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = tpi("run", "-m", model, "-p", "Hi", "--workers", address, cache=cache)
    assert done.returncode == 1
    assert address in done.stderr
    assert "tpi worker --listen 0.0.0.0:" in done.stderr
    assert "Traceback" not in done.stderr


def test_worker_port_in_use_is_one_sentence(cache: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = tpi("worker", "--listen", f"127.0.0.1:{taken.getsockname()[1]}", cache=cache)
    assert done.returncode in (1, 2)
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_tensor_is_named(tiny_model: Callable[[str], TinyModel], cache: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    source = tiny_model("llama").directory
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    before = sorted((cache / "packs").glob("*"))
    done = tpi("run", "-m", str(tmp_path), "-p", "Hi", cache=cache)
    assert done.returncode == 2
    assert "model.layers.1.mlp.up_proj.weight" in done.stderr
    assert sorted((cache / "packs").glob("*")) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ending_the_master_leaves_no_child(number: signal.Signals, model: str, cache: Path) -> None:
    command = [*TPI, "run", "-m", model, "-p", "Hello", "-n", "200", "--local", "2", "--temp", "0", "--raw"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean(cache)) as process:
        assert process.stdout
        process.stdout.read(1)  # the first token is there
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, error = process.communicate(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert b"Traceback" not in error
    if number == signal.SIGINT:
        assert process.returncode == 130
