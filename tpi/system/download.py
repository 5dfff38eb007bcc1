"""Large files over HTTP that go on where they stopped: also after an interrupt, and after the network was away."""

import fcntl
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO

Report = Callable[[int, int], None]  # bytes that are there, of how many
_CHUNK = 1 << 20
_TRIES = 5  # in a row that bring nothing
_TIMEOUT_S = 30  # without a byte
_LATER = (408, 429, 500, 502, 503, 504)  # what a server answers that may do better in a while
_RESTART = 416  # there is nothing after what is here


class DamagedFileError(Exception):
    """What came does not have the expected hash."""


def download(
    url: str,
    target: Path,
    digest: str,
    headers: Mapping[str, str] | None = None,
    report: Report = lambda done, total: None,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Write the file at `url` to `target`; what came earlier, in `.incomplete` beside it, is not asked for again.

    Another process that does the same is waited for.

    Args:
        url: where the file is, http or https.
        target: its path; it appears when all of it is there.
        digest: its SHA-256 in hexadecimal digits; a file that has another one is downloaded anew, once.
        headers: sent to the server of `url`, and not to those that it leads to.
        report: called with the bytes that are there, and all; all is 0 while it is not known.
        pause: waits for so many seconds before another try.

    Raises:
        OSError: if the server cannot be reached or refuses, or the file cannot be written. What came stays.
        DamagedFileError: if what comes does not have the hash; nothing stays.
    """
    partial = target.with_name(f"{target.name}.incomplete")
    with partial.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if target.exists():
            if partial.exists():
                partial.unlink()
            return
        for again in (False, True):
            _fill(urllib.request.Request(url, headers=dict(headers or {})), file, report, pause)
            if _digest(partial) == digest:
                break
            file.truncate(0)
            if again:
                partial.unlink()
                raise DamagedFileError(f"what {url} sends does not have the hash {digest}")
        file.flush()
        os.fsync(file.fileno())
        partial.replace(target)


def _fill(request: urllib.request.Request, file: BinaryIO, report: Report, pause: Callable[[float], None]) -> None:
    """Append the rest of a file, with tries as long as each brings something."""
    failed = 0
    while True:
        before = file.seek(0, os.SEEK_END)
        try:
            if _append(request, file, before, report):
                return
            error: Exception = ConnectionError(f"the connection to {request.host} broke")
        except (OSError, HTTPException) as caught:
            if not _may_pass(caught):
                raise
            error = caught
        failed = 0 if file.tell() > before else failed + 1
        if failed >= _TRIES:
            raise error if isinstance(error, OSError) else ConnectionError(str(error))
        if failed:
            pause(min(2.0**failed, 10.0))


def _may_pass(error: Exception) -> bool:
    """Return True for a failure of the network, or of a server that may be better in a while."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in _LATER
    return isinstance(error, urllib.error.URLError | ConnectionError | TimeoutError | HTTPException)


def _append(request: urllib.request.Request, file: BinaryIO, start: int, report: Report) -> bool:
    """Append what comes from byte `start` on; returns whether that is all."""
    asked = urllib.request.Request(request.full_url)
    for name, value in request.header_items():
        asked.add_unredirected_header(name, value)
    if start:
        asked.add_header("Range", f"bytes={start}-")
    try:
        answer = urllib.request.urlopen(asked, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != _RESTART or not start:
            raise
        file.truncate(0)
        return _append(request, file, 0, report)
    with answer:
        if start and not (answer.headers.get("Content-Range") or "").startswith(f"bytes {start}-"):
            file.truncate(0)  # the server sends it from the beginning
            start = 0
        length = int(answer.headers.get("Content-Length") or 0)
        whole = start + length if length else 0
        while chunk := answer.read(_CHUNK):
            file.write(chunk)
            file.flush()
            start += len(chunk)
            report(start, whole)
    return not whole or start == whole


def _digest(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
