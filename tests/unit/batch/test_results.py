"""The output file of a batch: cut at any byte, it is repaired; files of other programs stay untouched."""

import errno
import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from master.api.failures import RequestError
from master.batch.results import BatchResults
from master.batch.source import BatchSource, parsed
from tpi.errors import UsageError

URL = "/v1/completions"
WARNED: list[str] = []


def request(name: str, prompt: str = "é", **more: object) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": {"prompt": prompt}} | more)


def source(folder: Path, *lines: str) -> BatchSource:
    path = folder / "in.jsonl"
    path.write_text("\n".join(lines))
    return BatchSource(path)


def results(folder: Path, asked: BatchSource, model: str = "tiny") -> BatchResults:
    return BatchResults(folder / "out.jsonl", asked, [model], WARNED.append)


def answer(model: str = "tiny") -> dict[str, Any]:
    return {"response": {"status_code": 200, "body": {"model": model, "text": "ü\u2028"}}, "error": None}


def test_lines_are_found_whatever_ends_them(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + request("a").encode() + b"\r\n\n  \n" + request("b").encode())
    asked = BatchSource(path)
    assert [(line.number, line.custom_id) for line in asked.lines] == [(1, "a"), (4, "b")]
    assert parsed(asked.read(asked.lines[0])).body == {"prompt": "é"}


def test_a_line_is_known_by_what_it_says_wherever_it_stands(tmp_path: Path) -> None:
    one = source(tmp_path, request("a"), request("b"), "x", "x")
    other = source(tmp_path, "x", request("b"), request("c"), request("a"), "x")
    assert {line.id for line in one.lines} < {line.id for line in other.lines}
    assert len({line.id for line in other.lines}) == 5
    assert source(tmp_path, request("a", "e")).lines[0].id not in {line.id for line in one.lines}


def test_two_lines_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"lines 1 and 3 .* 'a'; give each its own"):
        source(tmp_path, request("a"), request("b"), request("a", "other"))


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: object, kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    asked = source(tmp_path, request("a"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UsageError, match=r"cannot lock .*: No locks"), results(tmp_path, asked):
        pass


def test_an_input_without_requests_or_none_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no requests"):
        source(tmp_path, "", " ")
    with pytest.raises(UsageError, match="cannot read"):
        BatchSource(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        (json.dumps({"url": URL, "body": {}}), "custom_id"),
        (request("a", method="GET"), "method must be POST, not 'GET'"),
        (request("a", url="/v1/embeddings"), "url must be /v1/chat/completions or /v1/completions"),
        (request("a", body=None), "body is missing"),
        (request("a", body={"prompt": "x", "stream": True}), "cannot stream answers"),
    ],
)
def test_what_is_no_request_is_refused_by_name(line: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parsed(line.encode())
    with pytest.raises(RequestError, match="not JSON"):
        parsed(b"\xff")


@settings(max_examples=40)
@given(cut=st.integers(0, 400), nuls=st.integers(0, 3))
def test_after_a_cut_at_any_byte_whole_lines_are_kept(
    tmp_path_factory: pytest.TempPathFactory, cut: int, nuls: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    asked = source(folder, request("a"), request("b"), request("c"))
    with results(folder, asked) as out:
        for line in asked.lines:
            out.write(line, answer())
    path = folder / "out.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] + (b"\0" * nuls if whole[:cut].endswith(b"\n") else b""))
    kept = whole[:cut].count(b"\n")
    with results(folder, asked) as out:
        assert out.answered == {line.id for line in asked.lines[:kept]}
        for line in asked.lines[kept:]:
            out.write(line, answer())
    assert path.read_bytes() == whole


class Reluctant:
    """A file that accepts seven bytes at a time."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        written: int = self._file.write(data[:7])
        return written


def test_a_line_is_written_whole_in_short_writes(tmp_path: Path) -> None:
    asked = source(tmp_path, request("a"))
    with results(tmp_path, asked) as out:
        out._file = Reluctant(out._file)
        out.write(asked.lines[0], answer())
    assert json.loads((tmp_path / "out.jsonl").read_text())["custom_id"] == "a"


def failure() -> dict[str, Any]:
    return {"response": {"status_code": 400, "body": {"error": {}}}, "error": None}


def unread() -> dict[str, Any]:
    return {"response": None, "error": {}}


def test_what_failed_is_asked_again_and_the_rest_stays(tmp_path: Path) -> None:
    asked = source(tmp_path, request("a"), request("b"), "no json", request("c"))
    path = tmp_path / "out.jsonl"
    with results(tmp_path, asked) as out:
        for line, said in zip(asked.lines, (answer(), failure(), unread(), answer()), strict=True):
            out.write(line, said)
        assert out.failed == {asked.lines[1].id, asked.lines[2].id}
    path.chmod(0o640)
    with results(tmp_path, asked) as out:
        assert (len(out.answered), len(out.failed)) == (4, 2)
    with BatchResults(path, asked, ["tiny"], WARNED.append, retry=True) as out:
        assert out.answered == {asked.lines[0].id, asked.lines[3].id}
        assert not out.failed
        with pytest.raises(UsageError, match="another tpi batch writes"):
            results(tmp_path, asked)
        out.write(asked.lines[1], answer())
        out.write(asked.lines[2], failure())
        assert out.failed == {asked.lines[2].id}
    assert [json.loads(line)["custom_id"] for line in path.read_text().strip().split("\n")] == ["a", "c", "b", None]
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_line_that_failed_may_be_mended_in_the_input(tmp_path: Path) -> None:
    asked, path = source(tmp_path, request("a"), request("b", method="GET")), tmp_path / "out.jsonl"
    with results(tmp_path, asked) as out:
        out.write(asked.lines[0], answer())
        out.write(asked.lines[1], failure())
    whole = path.read_bytes()
    mended = source(tmp_path, request("a"), request("b"))
    with pytest.raises(UsageError, match=r"answers 'b', .*; it is an error, which --retry removes"):
        results(tmp_path, mended)
    assert path.read_bytes() == whole
    with BatchResults(path, mended, ["tiny"], WARNED.append, retry=True) as out:
        assert out.answered == {mended.lines[0].id}
    with pytest.raises(UsageError, match="answers 'a', but the input has no line"):  # an answer is not thrown away
        BatchResults(path, source(tmp_path, request("b")), ["tiny"], WARNED.append, retry=True)


def test_a_disk_without_room_for_a_copy_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, path = source(tmp_path, request("a")), tmp_path / "out.jsonl"
    with results(tmp_path, asked) as out:
        out.write(asked.lines[0], failure())
    whole, sync = path.read_bytes(), os.fsync

    def full(number: int) -> None:
        if os.fstat(number).st_ino != path.stat().st_ino and stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: .*out\.jsonl"):
        BatchResults(path, asked, ["tiny"], WARNED.append, retry=True)
    assert path.read_bytes() == whole
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_an_output_of_others_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    asked = source(tmp_path, request("a"), request("b"))
    path = tmp_path / "out.jsonl"
    with results(tmp_path, asked) as out:
        out.write(asked.lines[0], answer())
    whole = path.read_text()
    for text, said in [
        (whole + whole, "line 2 answers 'a' a second time"),
        (whole + "notes\n", "line 2 is not an answer"),
        ("notes", "line 1 is not an answer"),
        (
            whole.replace("batch_req_", "batch_req_0"),
            "answers 'a', but the input has no line with exactly that request",
        ),
        (whole + '{"id": 1}\n', "line 2 is not an answer"),
        (whole + '{"id": "x", "custom_id": "b", "response": [1]}\n', "line 2 is not an answer"),
        (whole + '{"id": "x", "custom_id": "b", "response": {"body": 1}}\n', "line 2 is not an answer"),
    ]:
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            results(tmp_path, asked)
        assert path.read_text() == text
    path.write_text(whole)
    with pytest.raises(UsageError, match="of the model 'tiny', not 'large'"):
        results(tmp_path, asked, "large")


def test_an_output_has_one_writer_and_is_not_the_input(tmp_path: Path) -> None:
    asked = source(tmp_path, request("a"))
    with results(tmp_path, asked), pytest.raises(UsageError, match="another tpi batch writes"):
        results(tmp_path, asked)
    with pytest.raises(UsageError, match="is the input file"):
        BatchResults(asked.path, asked, ["tiny"], WARNED.append)
    with pytest.raises(UsageError, match="cannot write"):
        BatchResults(tmp_path / "none" / "out.jsonl", asked, ["tiny"], WARNED.append)
