"""Small files of a model directory: they are read with size limits, and their paths must not lead out of it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpi.errors import ModelError

_MAX_JSON = 8 << 20  # bytes; the index of a model of 36,000 tensors has 4 MB
_MAX_TEXT = 1 << 20  # bytes of a chat template
# Parsed JSON takes many times the memory of its text. These limits keep it under 64 MiB.
_MAX_DECODED = 10 << 20  # bytes of the text as a string; one wide character makes the string four times as large
_MAX_CONTAINERS = 3 << 15  # objects and arrays
_MAX_VALUES = 8 << 15  # commas


def resolve_inside(directory: Path, name: str) -> Path:
    """Return the real path of the file `name` in `directory`.

    A link is accepted only if it leads to a file in the same directory, or from a Hugging Face hub snapshot to the
    `blobs` directory of the same repository.

    Raises:
        ModelError: if the name is a path, or the file is missing, is not a regular file, or is a link that leads out of
            the directory.
    """
    if not name or "\0" in name or name != Path(name).name or name in (".", ".."):
        raise ModelError(
            f"{directory} names the file {name[:200]!r}, which is not a plain name inside the directory; refused"
        )
    path = directory / name
    try:
        real, home = path.resolve(strict=True), directory.resolve(strict=True)
    except UnicodeEncodeError as error:
        raise ModelError(
            f"{directory} names the file {name[:200]!r}, which is not a valid name; download the model again"
        ) from error
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{path} is missing; download the model again") from error
    snapshot = next((parent for parent in (home, home.parent) if parent.parent.name == "snapshots"), None)
    blobs = home if snapshot is None else snapshot.parent.parent / "blobs"
    if not real.is_file():
        raise ModelError(f"{path} is not a regular file; put a regular file there")
    if real.parent not in (home, blobs):
        raise ModelError(f"{path} is a link to a file outside its directory; put the file itself there")
    return real


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name` of `directory`.

    Raises:
        ModelError: if the file is missing, too large, or not a JSON object.
    """
    path = resolve_inside(directory, name)
    try:
        found = parse_json(_read(path, _MAX_JSON))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{directory / name} is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ModelError(f"{directory / name} is not a JSON object")
    return found


def read_json_if_there(directory: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in the file `name` of `directory`, or an empty dictionary if there is no such file.

    Raises:
        ModelError: if the file is too large, is not a JSON object, or is a link that leads out of the directory.
    """
    return read_json(directory, name) if (directory / name).exists() else {}


def parse_json(text: bytes, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of a JSON text in UTF-8, using at most about 64 MiB of memory.

    `hook` makes each object from its list of (name, value) pairs; the default makes a dictionary.

    Raises:
        ValueError: if the text is not JSON, or too large.
        RecursionError: if its objects and arrays are nested too deeply.
    """
    containers = text.count(b"{") + text.count(b"[")
    if len(text) > _MAX_JSON or containers > _MAX_CONTAINERS or text.count(b",") > _MAX_VALUES:
        raise ValueError("it has too many entries")
    decoded = text.decode("utf-8-sig")
    if sys.getsizeof(decoded) > _MAX_DECODED:
        raise ValueError("it has too many characters")
    return json.loads(decoded, object_pairs_hook=hook)


def read_text(directory: Path, name: str) -> str:
    """Return the text of the file `name` in `directory`.

    Raises:
        ModelError: if the file is missing, larger than 1 MiB, or not UTF-8.
    """
    path = resolve_inside(directory, name)
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
