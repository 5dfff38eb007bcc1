"""The estimated lengths of a batch's requests, and lines that are not requests."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from master.batch.estimate import usual_request
from master.batch.source import BatchSource
from tpi.errors import UsageError
from tpi.net.fields import UsualRequest


def source(tmp_path: Path, *lines: dict[str, Any]) -> BatchSource:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return BatchSource(path)


def chat(name: str, content: Any, **limits: int) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], **limits}
    return {"custom_id": name, "url": "/v1/chat/completions", "body": body}


def test_usual_lengths_are_the_means(tmp_path: Path) -> None:
    texts = [{"type": "text", "text": "x" * 397}]
    found = usual_request(source(tmp_path, chat("a", "y" * 200, max_tokens=10), chat("b", texts, max_tokens=30)))
    assert found is not None
    assert 75 <= found.prompt <= 85
    assert found.answer == 20
    ids = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": [[1] * 40], "max_completion_tokens": 5}}
    assert usual_request(source(tmp_path, ids)) == UsualRequest(40, 5)


def test_a_line_without_a_limit_has_its_urls_own(tmp_path: Path) -> None:
    text = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "x" * 40, "max_tokens": True}}
    assert usual_request(source(tmp_path, text)) == UsualRequest(10, 16)
    found = usual_request(source(tmp_path, chat("a", "")))
    assert found is not None
    assert found.answer == 256


def test_lines_that_ask_for_nothing_say_nothing(tmp_path: Path) -> None:
    assert usual_request(source(tmp_path, {"url": "/nowhere"})) is None
    assert usual_request(source(tmp_path, {"url": "/nowhere"}, chat("a", "", max_tokens=7))) == UsualRequest(1, 7)


def test_a_pipe_is_refused_as_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"pipe is not a regular file; write the batch lines to a regular file"):
        BatchSource(tmp_path / "pipe")
