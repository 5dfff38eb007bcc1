"""Small files of a model directory, read with limits, and paths that must not lead out of it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpi.errors import ModelError

_MAX_JSON = 8 << 20  # bytes; the index of a model of 36,000 tensors has 4 MB
_MAX_TEXT = 1 << 20  # bytes of a chat template
# Parsed JSON takes many times the memory of its text: what is counted here keeps it under 64 MiB.
_MAX_DECODED = 10 << 20  # bytes of the text as a string, which one wide character makes four times as long
_MAX_CONTAINERS = 3 << 15
_MAX_VALUES = 8 << 15


def inside(directory: Path, name: str) -> Path:
    """The file `name` of `directory`, which must be there and not elsewhere.

    Links are followed only inside the directory, or from a hub snapshot to the `blobs` of the same repository.

    Raises:
        ModelError: if the name is a path or a link that leads out of the directory, or there is no such file.
    """
    if not name or "\0" in name or name != Path(name).name or name in (".", ".."):
        raise ModelError(f"{directory} names the file {name[:200]!r}, which is outside the model's directory; refused")
    path = directory / name
    try:
        real, home = path.resolve(strict=True), directory.resolve(strict=True)
    except UnicodeEncodeError as error:
        raise ModelError(f"{directory} names the file {name[:200]!r}, which no file is called; refused") from error
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{path} is missing; download the model again") from error
    snapshot = next((parent for parent in (home, home.parent) if parent.parent.name == "snapshots"), None)
    blobs = home if snapshot is None else snapshot.parent.parent / "blobs"
    if not real.is_file():
        raise ModelError(f"{path} is not a regular file; refused, put the file itself there")
    if real.parent not in (home, blobs):
        raise ModelError(f"{path} is a link out of its directory; refused, put the file itself there")
    return real


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The JSON object in file `name` of `directory`.

    Raises:
        ModelError: if it is missing, too large, or not a JSON object.
    """
    path = inside(directory, name)
    try:
        found = parse_json(_read(path, _MAX_JSON))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{directory / name} is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ModelError(f"{directory / name} is not a JSON object")
    return found


def read_json_if_there(directory: Path, name: str) -> dict[str, Any]:
    """Like `read_json`, but an empty dictionary if there is no such file."""
    return read_json(directory, name) if (directory / name).exists() else {}


def parse_json(text: bytes, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text in UTF-8, within the memory that a stranger's file may take; `hook` makes the objects.

    Raises:
        ValueError: if it is not JSON, or too large.
        RecursionError: if it is too deep.
    """
    containers = text.count(b"{") + text.count(b"[")
    if len(text) > _MAX_JSON or containers > _MAX_CONTAINERS or text.count(b",") > _MAX_VALUES:
        raise ValueError("it has too many entries")
    decoded = text.decode("utf-8-sig")
    if sys.getsizeof(decoded) > _MAX_DECODED:
        raise ValueError("it has too many characters")
    return json.loads(decoded, object_pairs_hook=hook)


def read_text(directory: Path, name: str) -> str:
    """The text in file `name` of `directory`.

    Raises:
        ModelError: if it is missing, too large, or not UTF-8.
    """
    path = inside(directory, name)
    try:
        return _read(path, _MAX_TEXT).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{directory / name} is not UTF-8 (byte {error.start}); download it again") from error


def _read(path: Path, most: int) -> bytes:
    try:
        if path.stat().st_size > most:
            raise ModelError(f"{path} is larger than {most} bytes; refused")
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
