"""`tpi batch` in real processes: killed several times, interrupted, and given wrong files."""

import json
import random
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from tests.support.commands import TPI, clean, tpi
from tests.support.models import TinyModel

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SECONDS = 100
CARD = ("--device", "emu:1GiB,stretch=1", "--gpu-memory", "6MiB", "--weights", "ram", "--pipeline", "batch")


def request(number: int) -> dict[str, Any]:
    """Return a batch line with a prompt and an answer of drawn lengths; every ninth line is invalid."""
    words = " ".join(str(number * step % 97) for step in range(1 + number % 13))
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 1 + number * 7 % 40}
    if number % 9 == 8:
        body["max_tokens"] = -2
    if number % 2:
        body["messages"] = [{"role": "user", "content": words}]
    else:
        body["prompt"] = words
    return {"custom_id": f"r{number}", "method": "POST", "url": CHAT if number % 2 else TEXT, "body": body}


def written(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps(request(number)) + "\n" for number in range(count)))
    return path


def answers(path: Path) -> dict[str, Any]:
    """Return the compared fields of every answer, by its custom_id; check that no custom_id occurs twice."""
    found: dict[str, Any] = {}
    for line in path.read_text().splitlines():
        said = json.loads(line)
        assert said["custom_id"] not in found
        body = said["response"]["body"]
        found[said["custom_id"]] = body.get("choices") or body["error"]
    return found


def killed(command: Sequence[str], cache: Path, out: Path, lines: int, number: signal.Signals) -> int | None:
    """Run until `out` has `lines` lines, then send a signal; return the exit code, None if the run had ended before."""
    until = monotonic() + SECONDS
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=clean(cache)) as process:
        while process.poll() is None and (not out.exists() or out.read_bytes().count(b"\n") < lines):
            assert monotonic() < until
            sleep(0.001)
        if process.poll() is not None:
            return None
        process.send_signal(number)
        process.communicate(timeout=SECONDS)
        return process.returncode


def test_killed_ten_times_each_request_is_answered_once(model: str, cache: Path, tmp_path: Path) -> None:
    asked = written(tmp_path / "in.jsonl", 120)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    flags = ("-m", model, "--dtype", "f32", "-q", "-c", "256")
    undisturbed = tpi("batch", str(asked), "-o", str(whole), *flags, cache=cache)
    assert undisturbed.returncode == 0, undisturbed.stderr
    draw, command = random.Random(26), [*TPI, "batch", str(asked), "-o", str(out), *flags]
    done = 0
    for turn in range(10):
        done += draw.randint(0, 9)  # 0: before anything is answered
        with_card = CARD if turn in (2, 5, 8) else ()  # in micro-batches on an accelerator
        assert killed([*command, *with_card], cache, out, done, signal.SIGKILL) == -signal.SIGKILL
        done = out.read_bytes().count(b"\n")
    assert done < 120
    last = tpi(*command[len(TPI) :], cache=cache)
    assert last.returncode == 0, last.stderr
    assert answers(out) == answers(whole)
    assert len(answers(out)) == 120
    again = tpi("batch", str(asked), "-o", str(out), *flags[:-3], cache=cache)
    assert again.returncode == 1  # every ninth has an error in place of an answer
    assert f"all 120 requests of {asked} are answered in {out} already" in again.stderr


def test_interrupted_on_three_nodes_it_says_so_and_goes_on(model: str, cache: Path, tmp_path: Path) -> None:
    asked, out = written(tmp_path / "in.jsonl", 20), tmp_path / "out.jsonl"
    flags = ("-m", model, "--dtype", "f32", "--local", "2", "-c", "256")
    command = [*TPI, "batch", str(asked), "-o", str(out), *flags]
    assert killed(command, cache, out, 1, signal.SIGINT) in (130, None)
    done = tpi(*command[len(TPI) :], cache=cache)
    assert done.returncode == 0, done.stderr
    assert len(answers(out)) == 20
    assert "already" in done.stderr
    assert answers(out)["r8"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            {"body": {"model": "gpt-9", "prompt": "x"}},
            "the model is called 'llama' or 'gpt-4o', not 'gpt-9'; add that name",
        ),
        ({"body": {"prompt": [1 << 20]}}, "token ids must be from 0"),
        ({"body": {"prompt": "word " * 5000}}, "over the context of"),
        ({"url": CHAT, "body": {"messages": "x"}}, "messages: "),
    ],
)
def test_a_refused_request_has_a_line_with_the_reason(
    line: dict[str, Any], said: str, tiny_model: Callable[[str], TinyModel], cache: Path, tmp_path: Path
) -> None:
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = {"custom_id": "good", "method": "POST", "url": TEXT, "body": {"prompt": "x", "model": "gpt-4o"}}
    asked.write_text(json.dumps(good | {"custom_id": "bad"} | line) + "\nno json\n" + json.dumps(good))
    model = str(tiny_model("llama").directory)
    names = ("--alias", "llama", "--alias", "gpt-4o")
    done = tpi("batch", str(asked), "-o", str(out), "-m", model, *names, "-c", "256", cache=cache)
    assert done.returncode == 0, done.stderr
    found = {one["custom_id"]: one for one in map(json.loads, out.read_text().splitlines())}
    assert said in found["bad"]["response"]["body"]["error"]["message"]
    assert found["good"]["response"]["status_code"] == 200
    assert found["good"]["response"]["body"]["model"] == "gpt-4o"
    assert found[None]["response"] is None
    assert found[None]["error"]["message"].startswith("line 2: the line is not JSON")
    assert "3 requests answered, 2 of them with an error" in done.stderr
    assert f"2 of 3 requests have an error in {out} in place of an answer; --retry sends them again" in done.stderr


def test_what_failed_is_said_again_and_tried_again(model: str, cache: Path, tmp_path: Path) -> None:
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = {"custom_id": "good", "method": "POST", "url": TEXT, "body": {"prompt": "x", "max_tokens": 3}}
    bad = good | {"custom_id": "bad", "body": {"prompt": "x", "max_tokens": 0}}
    asked.write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n")
    command = ("batch", str(asked), "-o", str(out), "-m", model, "-c", "256")
    first, again, retried = (tpi(*command, *more, cache=cache) for more in ((), ("-q",), ("--retry",)))
    assert [first.returncode, again.returncode, retried.returncode] == [0, 1, 1], retried.stderr
    for done in (first, again, retried):
        assert "1 of 2 requests have an error in" in done.stderr
    asked.write_text(asked.read_text().replace('"max_tokens": 0', '"max_tokens": 4'))
    mended = tpi(*command, "--retry", cache=cache)
    assert mended.returncode == 0, mended.stderr
    assert {one["custom_id"] for one in map(json.loads, out.read_text().splitlines())} == {"good", "bad"}
    assert "error" not in mended.stderr


def test_wrong_files_are_named_before_anything_is_loaded(model: str, cache: Path, tmp_path: Path) -> None:
    asked = written(tmp_path / "in.jsonl", 3)
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes")
    for arguments, said in [
        ((str(tmp_path / "none"), "-o", "x"), "cannot read"),
        ((str(asked), "-o", str(asked)), "is the input file"),
        ((str(asked), "-o", str(notes)), "its line 1 is not an answer"),
        ((str(asked),), "Missing option '-o'"),
    ]:
        done = tpi("batch", *arguments, "-m", model, cache=cache)
        assert done.returncode == 2
        assert said in done.stderr
    assert notes.read_text() == "my notes"
