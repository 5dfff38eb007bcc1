"""Graphics chips that are found and fail, whatever a driver or a library raises: left out, with a reason."""

import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any

import pytest

from tpi.devices import child, choose, trial
from tpi.devices.failures import close_all, reason
from tpi.errors import DeviceError, KernelError, UsageError


class CompilationError(Exception):
    """Like Triton's error, whose text begins with the source."""

    error_message = "Unsupported conversion from 'bf16'"

    def __str__(self) -> str:
        return "at 3:7:\n    x = y\n    ^"


FAILURES = [
    (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), "CUDA error: out of memory"),
    (UsageError("there is no card; name another"), "there is no card"),
    (KernelError("the compiler refuses the program"), "the compiler refuses the program"),
    (AssertionError("Torch not compiled with CUDA enabled"), "AssertionError: Torch not compiled with CUDA enabled"),
    (OSError("libcuda.so.1: cannot open shared object file"), "libcuda.so.1: cannot open shared object file"),
    (ImportError("libOpenCL.so.1: undefined symbol"), "libOpenCL.so.1: undefined symbol"),
    (CompilationError(), "Unsupported conversion from 'bf16'"),
    (CalledProcessError(1, ["gcc", "main.c"]), "Command '['gcc', 'main.c']' returned non-zero exit status 1"),
    (MemoryError(), "MemoryError"),
    (KeyError("sm_75"), "KeyError: 'sm_75'"),
    (RuntimeError("a driver's \x1b[31mred\u202e text"), "a driver's ?[31mred? text"),
]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TPI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def one_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_candidates", lambda: ["cuda"])
    monkeypatch.setattr(child, "try_chip", lambda name: None)


def refuse(error: BaseException) -> Callable[..., Any]:
    def raising(*_: object, **__: object) -> None:
        raise error

    return raising


@pytest.mark.usefixtures("one_chip")
@pytest.mark.parametrize(("error", "said"), FAILURES)
@pytest.mark.parametrize("place", ["tpi.devices.trial.open_device", "tpi.devices.child.try_chip"])
def test_whatever_it_raises_it_is_left_out_in_one_line(
    place: str, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(place, refuse(error))
    assert trial.find_accelerator() is None
    assert capsys.readouterr().err == f"tpi: graphics chip cuda was found but is not used: {said}\n"


@pytest.mark.usefixtures("one_chip")
def test_the_next_one_is_taken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    opened: Any = object()
    monkeypatch.setattr(trial, "_candidates", lambda: ["cuda", "opencl:1"])
    monkeypatch.setattr(trial, "open_device", lambda name, _: opened if name == "opencl:1" else refuse(OSError("no"))())
    assert trial.find_accelerator() is opened
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("error", "said"), FAILURES)
def test_a_listing_that_fails_leaves_the_other_kind(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trial, "_there", lambda _: True)
    monkeypatch.setattr(trial, "_installed", lambda _: True)
    monkeypatch.setattr(child, "list_chips", refuse(error))
    assert trial._candidates() == ["cuda"]
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("error", "said"), FAILURES)
def test_one_that_was_named_is_refused_in_one_sentence(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tpi.devices.cuda.device", SimpleNamespace(open_cuda=refuse(error)))
    kind = type(error) if isinstance(error, (UsageError, KernelError)) else DeviceError
    with pytest.raises(kind) as caught:
        choose.open_device("cuda:0")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_whose_library_is_broken_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choose._KINDS, "cuda", "tpi.devices.not_there:open_cuda")
    with pytest.raises(
        DeviceError, match=r"^cuda cannot be used: No module named .*; choose another device, or --device"
    ):
        choose.open_device("cuda")


def python(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Make the child process run `code` in place of a trial."""
    monkeypatch.setattr(child, "_COMMAND", (sys.executable, "-c", code))


CRASHES = [
    ("import os; os.abort()", "its driver crashed (SIGABRT)"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "its driver crashed (SIGSEGV)"),
    ("import os; os._exit(7)", "its driver ended the process that tried it (exit code 7)"),
    ("print('hello')", "its driver ended the process that tried it (exit code 0)"),
    ("import threading; threading.Event().wait()", "its driver did not answer within 1 s"),
]


@pytest.mark.parametrize(("code", "said"), CRASHES)
def test_a_driver_that_crashes_or_hangs_takes_a_child_along_once(
    code: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    python(monkeypatch, code)
    monkeypatch.setattr(child, "_DEADLINE_S", 1.0)
    for _ in range(2):
        with pytest.raises(DeviceError) as caught:
            child.try_chip("cuda")
        assert str(caught.value) == said
        monkeypatch.setattr(child, "_ask", refuse(AssertionError("it is asked again")))


def test_what_works_is_remembered_until_a_driver_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "version"
    monkeypatch.setattr(child, "_DRIVERS", (driver,))
    python(monkeypatch, "print('{\"result\": []}')")
    child.try_chip("cuda")
    python(monkeypatch, "import os; os.abort()")
    child.try_chip("cuda")
    driver.write_text("NVRM version: 999")
    with pytest.raises(DeviceError, match="crashed"):
        child.try_chip("cuda")


def test_a_refusal_is_found_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    python(monkeypatch, 'print(\'{"failure": "permission denied"}\')')
    with pytest.raises(DeviceError, match="permission denied"):
        child.try_chip("opencl:0")
    python(monkeypatch, "print('{\"result\": []}')")
    child.try_chip("opencl:0")


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL", "SIGTERM"])
def test_a_child_that_another_program_ends_is_asked_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    python(monkeypatch, f"import os, signal; os.kill(os.getpid(), signal.{name}); signal.pause()")
    with pytest.raises(DeviceError, match=rf"the process that tried it was ended \({name}\)"):
        child.try_chip("cuda")
    python(monkeypatch, "print('{\"result\": []}')")
    child.try_chip("cuda")


def test_files_of_the_working_directory_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "signal", "runpy", "tpi"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadow')")
    monkeypatch.chdir(tmp_path)
    child.try_chip("emu:1GiB")


DAMAGED = ["", "[]", '{"list": 3}', '{"list": {"at": "x", "answer": {"result": []}}}',
           '{"list": {"answer": {"result": []}}}', '{"list": {"at": null, "answer": {"result": []}}}']  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_records_cost_a_trial(text: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    (cache / "chips.json").write_text(text)
    python(monkeypatch, 'print(\'{"result": ["opencl:3"]}\')')
    assert child.list_chips() == ["opencl:3"]


def test_a_cache_that_cannot_be_written_costs_a_trial(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("not a folder")
    python(monkeypatch, "print('{\"result\": []}')")
    child.try_chip("cuda")


def test_a_real_child_tries_and_lists() -> None:
    child.try_chip("emu:1GiB")
    with pytest.raises(DeviceError, match="no device called 'gpu'"):
        child.try_chip("gpu")
    assert all(name.startswith("opencl:") for name in child.list_chips())


def test_every_step_of_an_end_is_taken() -> None:
    taken: list[str] = []
    close_all(refuse(RuntimeError("sticky")), lambda: taken.append("freed"), refuse(OSError()))
    assert taken == ["freed"]


def test_a_reason_is_short() -> None:
    assert len(reason(OSError("x" * 9000))) == 300
