"""`tpi testbed ...`, with a stand-in for `tpi worker`. Most tests need root on Linux."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import state
from tests.support.terminal import CTRL_C, ENTER, terminal
from tests.support.testbed_helpers import ECHO, PATIENCE_S, TPI, needs_root, traces, until

ASK = """
import os, socket, sys
for address in os.environ["TPI_WORKERS"].split(","):
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), 10) as client:
        client.sendall(b"hello")
        print(address, client.recv(5).decode(), os.environ["TPI_DEVICE"], os.environ["TPI_TESTBED"])
sys.exit(3)
"""


@pytest.fixture
def worker(tmp_path: Path) -> str:
    """Return a command in place of `tpi worker`: it echoes, and accepts the worker's flags."""
    script = tmp_path / "echo.py"
    script.write_text("import sys\nsys.argv[1] = sys.argv[sys.argv.index('--listen') + 1].split(':')[0]\n" + ECHO)
    return f"{sys.executable} {script}"


@pytest.fixture
def up() -> Iterator[str]:
    """Make a verified testbed with `up`, and yield its id; take it down at the end."""
    done = verified("up", "two-devices")
    assert done.returncode == 0, done.stderr
    assert "10.77.0.2" in done.stdout
    assert "verified: 1 round trips" in done.stderr
    name = re.search(r"testbed (\w+):", done.stdout)[1]  # type: ignore[index]  # a match, or the test fails here
    yield name
    subprocess.run([*TPI, "down", name], capture_output=True, check=False)


def verified(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Repeat a command that verifies its testbed, because a busy machine sometimes cannot emulate."""
    deadline = time.monotonic() + PATIENCE_S
    while (done := tpi(*arguments)).returncode and "are not as specified" in done.stderr:
        assert time.monotonic() < deadline, done.stderr
    return done


def sleeping_run(worker: str) -> tuple["subprocess.Popen[str]", str]:
    """Start a run whose command never ends; return it and the id of its testbed."""
    script = "import os, time; print(os.environ['TPI_TESTBED'], flush=True); time.sleep(1000)"
    command = [*TPI, "run", "two-devices", "--no-verify", "--worker", worker, "--", sys.executable, "-c", script]
    run = subprocess.Popen(  # in a session of its own, and so without a terminal
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert run.stdout is not None
    with run.stdout:
        return run, run.stdout.readline().strip()


def tpi(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*TPI, *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_without_root_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tpi.cli import main

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for command in (["up", "two-devices"], ["run", "two-devices", "--", "true"], ["down"]):
        monkeypatch.setattr(sys, "argv", ["tpi", "testbed", *command])
        with pytest.raises(SystemExit) as left:
            main()
        complaint = capsys.readouterr().err
        assert left.value.code == 1
        assert complaint.count("\n") == 1
        assert "needs root" in complaint


def test_doctor_says_without_root_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tpi.cli import run_command

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("testbed.checks.doctor._TUN", "/nowhere/tun")
    assert run_command(["testbed", "doctor"]) == 1
    said = capsys.readouterr()
    assert re.search("^NO  root +no, this is user 1000; run it with sudo$", said.out, re.MULTILINE)
    assert re.search("^NO  TUN devices +/nowhere/tun does not exist; run `modprobe tun`", said.out, re.MULTILINE)
    assert "limits of memory" in said.out
    assert said.err == ""


def test_doctor_names_namespaces_that_root_may_not_make(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tpi.cli import run_command

    def refused() -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("testbed.checks.doctor.new_namespace", refused)
    assert run_command(["testbed", "doctor"]) == 1
    assert re.search(
        "^NO  network namespaces +cannot be created: .*; in a container,", capsys.readouterr().out, re.MULTILINE
    )


def test_shipped_topologies_are_listed() -> None:
    assert "paper-8-devices" in tpi("topologies").stdout


def test_a_bad_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("devices:\n  a: {cores: 2}\n")
    done = tpi("up", str(tmp_path / "bad.yaml"))
    assert done.returncode == 2
    assert "line 2" in done.stderr
    assert "cores" in done.stderr


@needs_root
def test_doctor_says_what_is_used() -> None:
    done = tpi("doctor")
    assert done.returncode == 0
    for word in ("netem", "links are shaped by", "congestion control", "limits of memory", "real-time priority"):
        assert word in done.stdout


@needs_root
def test_run_starts_workers_and_tears_down(worker: str) -> None:
    done = verified("run", "two-devices", "--worker", worker, "--", sys.executable, "-c", ASK)
    assert done.returncode == 3, done.stderr
    address, word, device, name = done.stdout.split()
    assert (address, word, device) == ("10.77.0.2:9990", "hello", "device1")
    assert "link process" in done.stderr
    assert traces(state.default_root(), name) == []


@needs_root
def test_a_worker_that_ends_at_once_is_named() -> None:
    done = tpi("run", "two-devices", "--no-verify", "--worker", "sh -c 'echo cannot; exit 7' --", "--", "true")
    assert done.returncode == 1
    assert "the worker on device2 ended with code 7" in done.stderr
    assert "cannot" in done.stderr


@needs_root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_a_run_nothing_is_left(worker: str, number: signal.Signals) -> None:
    """SIGKILL cannot be caught; the testbed's holder process then notices, and cleans up by itself."""
    run, name = sleeping_run(worker)
    assert traces(state.default_root(), name)
    run.send_signal(number)
    code = run.wait(30)
    assert code == (-number if number == signal.SIGKILL else 130 if number == signal.SIGINT else 128 + number)
    until(lambda: traces(state.default_root(), name) == [])


@needs_root
def test_ctrl_c_is_left_to_the_command(worker: str) -> None:
    script = "try: input('ready')\nexcept KeyboardInterrupt: raise SystemExit(int(input('goes on')))"
    command = [*TPI, "run", "two-devices", "--no-verify", "--worker", worker, "--", sys.executable, "-c", script]
    with terminal(command, os.environ) as run:
        run.expect("ready")
        run.type(CTRL_C)
        run.expect("goes on")
        run.type("5" + ENTER)
        assert run.leave() == 5


@needs_root
def test_down_removes_what_two_kills_left(worker: str) -> None:
    run, name = sleeping_run(worker)
    os.kill(state.read(state.default_root() / name).holder, signal.SIGKILL)
    run.kill()
    run.wait()
    assert (state.default_root() / name).exists()
    assert tpi("down", name).returncode == 0
    assert traces(state.default_root(), name) == []


@needs_root
def test_up_exec_status_fault_down(up: str) -> None:
    missing = tpi("exec", "--id", up, "device2", "--", "no-such-program")
    assert missing.returncode == 1
    assert "cannot start 'no-such-program' on device device2: No such file" in missing.stderr
    there = tpi("exec", "--id", up, "device2", "--", "sh", "-c", "echo $TPI_DEVICE")
    assert there.stdout == "device2\n"
    assert "link process" in tpi("status", "--id", up).stderr
    assert '"packets"' in tpi("status", "--id", up, "--json").stdout
    assert tpi("fault", "--id", up, "slow", "device2", "--bandwidth", "10 Mbit").stdout == "slow: device2\n"
    wrong = tpi("fault", "--id", up, "slow", "device2", "--latency", "3 parsec")
    assert wrong.returncode == 2
    assert "parsec" in wrong.stderr
    assert tpi("fault", "--id", up, "cut", "nobody").returncode == 1
    assert tpi("down", up).stdout == f"down: {up}\n"
    assert traces(state.default_root(), up) == []
    assert tpi("down", up).returncode == 1
