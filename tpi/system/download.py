"""Downloads of large files over HTTP that are resumed after an interrupt or a lost connection."""

import fcntl
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from http.client import HTTPException
from pathlib import Path
from ssl import SSLError
from typing import BinaryIO

Report = Callable[[int, int], None]  # called with the bytes received so far and in total
_CHUNK = 1 << 20
_TRIES = 5  # tries in a row that may bring nothing
_TIMEOUT_S = 30  # without a byte
_LATER = (408, 429, 500, 502, 503, 504)  # temporary failures, worth another try
_NOTHING_LEFT = 416


class DamagedFileError(Exception):
    """Raised if a downloaded file does not have the expected hash."""


def wants_more(error: OSError) -> bool:
    """Return True if a server refused the request, or its certificate was not accepted: credentials may be needed."""
    return isinstance(error, urllib.error.HTTPError) or isinstance(getattr(error, "reason", None), SSLError)


def download(
    url: str,
    target: Path,
    digest: str,
    headers: Mapping[str, str] | None = None,
    report: Report = lambda done, total: None,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Download the file at `url` to `target`.

    Bytes received earlier are in a file next to it that ends in `.incomplete`, and are not requested again. If another
    process downloads the same file, wait for it.

    Args:
        url: address of the file, http or https.
        target: path of the file, which appears when it is complete.
        digest: its SHA-256 in hexadecimal digits. A file with another hash is downloaded again, once.
        headers: sent to the server of `url`, but not to servers that it redirects to.
        report: called with the bytes received and the total; the total is 0 while it is not known.
        pause: called with the number of seconds to wait before another try.

    Raises:
        OSError: if the server cannot be reached or refuses, or the file cannot be written. Received bytes are kept.
        DamagedFileError: if the file does not have the hash. Nothing is kept.
    """
    partial = target.with_name(f"{target.name}.incomplete")
    with _locked(partial) as file:
        try:
            if not target.exists():
                _fetch(urllib.request.Request(url, headers=dict(headers or {})), file, digest, report, pause)
                os.fsync(file.fileno())
                partial.replace(target)
        finally:
            if target.exists() or not file.tell():
                partial.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open a file for appending while holding a lock, which keeps other processes from appending too."""
    while True:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_nlink:  # else another process has removed it in the meantime
                yield file
                return


def _fetch(
    request: urllib.request.Request, file: BinaryIO, digest: str, report: Report, pause: Callable[[float], None]
) -> None:
    """Download the rest of `file`. If the complete file does not have the hash `digest`, download it once more."""
    for _ in range(2):
        _fill(request, file, report, pause)
        if _digest(Path(file.name)) == digest:
            return
        file.truncate(0)
        file.seek(0)
    raise DamagedFileError(f"the file at {request.full_url} does not have the hash {digest}")


def _fill(request: urllib.request.Request, file: BinaryIO, report: Report, pause: Callable[[float], None]) -> None:
    """Append the rest of the download to `file`. Give up if `_TRIES` tries in a row add no byte."""
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
    """Return True for a failure of the network, or one of the server that may end by itself."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in _LATER
    return isinstance(error, urllib.error.URLError | ConnectionError | TimeoutError | HTTPException)


def _append(request: urllib.request.Request, file: BinaryIO, start: int, report: Report) -> bool:
    """Request the bytes from `start` on and append them to `file`. Return True if the file is then complete."""
    asked = urllib.request.Request(request.full_url)
    for name, value in request.header_items():
        asked.add_unredirected_header(name, value)
    if start:
        asked.add_header("Range", f"bytes={start}-")
    try:
        answer = urllib.request.urlopen(asked, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == _NOTHING_LEFT and start:
            return True
        raise
    with answer:
        if start and not (answer.headers.get("Content-Range") or "").startswith(f"bytes {start}-"):
            file.truncate(0)  # the server ignored the range and sends the whole file
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
