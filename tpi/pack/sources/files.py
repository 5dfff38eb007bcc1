"""Small files of a model directory, read with limits, and paths that must not lead out of it."""

import json
from pathlib import Path
from typing import Any

from tpi.errors import ModelError

_MAX_JSON = 32 << 20  # bytes; the index of a model of 100,000 tensors has 10 MB


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
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{path} is missing; download the model again") from error
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if real.parent not in (home, blobs) or not real.is_file():
        raise ModelError(f"{path} is a link out of its directory; refused, put the file itself there")
    return real


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The JSON object in file `name` of `directory`.

    Raises:
        ModelError: if it is missing, too large, or not a JSON object.
    """
    path = inside(directory, name)
    try:
        if path.stat().st_size > _MAX_JSON:
            raise ModelError(f"{path} is larger than {_MAX_JSON} bytes; refused")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{directory / name} is not valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ModelError(f"{directory / name} is not a JSON object")
    return found


def read_json_if_there(directory: Path, name: str) -> dict[str, Any]:
    """Like `read_json`, but an empty dictionary if there is no such file."""
    return read_json(directory, name) if (directory / name).exists() else {}
