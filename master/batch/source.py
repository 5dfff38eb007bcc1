"""The input of a batch in OpenAI's form (API reference, "Batch"), with an id for each line made from its contents."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from master.api.failures import RequestError
from tpi.errors import UsageError

URLS = ("/v1/chat/completions", "/v1/completions")
ID = "batch_req_"
_BOM = b"\xef\xbb\xbf"  # byte order mark, which some editors write


@dataclass(frozen=True)
class BatchLine:
    """One request, and its place in the file: line number from 1, offset and length in bytes.

    `id` depends only on the line's contents and the number of equal lines before it.
    """

    number: int
    offset: int
    nbytes: int
    id: str
    custom_id: str | None


@dataclass(frozen=True)
class BatchRequest:
    """The request that a line contains."""

    url: str
    body: dict[str, Any]


class BatchSource:
    """The lines of an input that are not empty. Their contents are not kept in memory but read again when needed."""

    def __init__(self, path: Path) -> None:
        """Read the file's lines.

        Raises:
            UsageError: if the file cannot be read or has no line, or two of its lines have the same custom_id.
        """
        self.path = path
        if path.exists() and not path.is_file():  # it is read more than once
            raise UsageError(f"{path} is not a regular file; write the batch lines to a regular file, and name it")
        try:
            self.lines = list(_lines(path))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}; name a file of batch lines") from error
        if not self.lines:
            raise UsageError(f"{path} has no requests; write one JSON object on each line")
        self._refuse_twins()

    def read(self, line: BatchLine) -> bytes:
        """Return the contents of a line."""
        with self.path.open("rb") as file:
            file.seek(line.offset)
            return file.read(line.nbytes)

    def _refuse_twins(self) -> None:
        first: dict[str, int] = {}
        for line in self.lines:
            if line.custom_id is None:
                continue
            if line.custom_id in first:
                raise UsageError(
                    f"lines {first[line.custom_id]} and {line.number} of {self.path} have the same custom_id "
                    f"{line.custom_id!r}; give each its own"
                )
            first[line.custom_id] = line.number


def parsed(raw: bytes) -> BatchRequest:
    """Return the request of a line.

    Raises:
        RequestError: if the line is not of OpenAI's batch form, or asks for something unsupported.
    """
    fields = _object(raw)
    if not isinstance(fields.get("custom_id"), str):
        raise RequestError("custom_id is missing or not a string; add one to each line", "custom_id", "invalid_value")
    if fields.get("method", "POST") != "POST":
        raise RequestError(f"method must be POST, not {fields['method']!r:.40}", "method", "invalid_value")
    if fields.get("url") not in URLS:
        raise RequestError(f"url must be {' or '.join(URLS)}, not {fields.get('url')!r:.80}", "url", "invalid_url")
    body = fields.get("body")
    if not isinstance(body, dict):
        raise RequestError("body is missing or not an object", "body", "invalid_value")
    if body.get("stream"):
        raise RequestError("a batch cannot stream answers; leave stream out", "stream", "invalid_value")
    return BatchRequest(fields["url"], body)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the line is not JSON: {error}", code="invalid_json_line") from None
    if not isinstance(fields, dict):
        raise RequestError("the line is not a JSON object", code="invalid_json_line")
    return fields


def _lines(path: Path) -> Iterator[BatchLine]:
    same = Counter[bytes]()
    offset = 0
    with path.open("rb") as file:
        for number, whole in enumerate(file, 1):
            at, offset = offset, offset + len(whole)
            bom = len(_BOM) if number == 1 and whole.startswith(_BOM) else 0
            text = whole[bom:].rstrip(b"\r\n")
            if not text.strip():
                continue
            digest = hashlib.sha256(text).digest()
            same[digest] += 1
            digest = hashlib.sha256(digest + same[digest].to_bytes(8, "little")).digest()
            yield BatchLine(number, at + bom, len(text), ID + digest.hex()[:24], custom_id_of(text))


def custom_id_of(raw: bytes) -> str | None:
    """Return the custom_id of a line; None if it has none."""
    try:
        custom_id = _object(raw).get("custom_id")
    except RequestError:
        return None
    return custom_id if isinstance(custom_id, str) else None
