"""Names of the parts of a GGUF model that is split into several files: `name-00001-of-00003.gguf`."""

import re
from pathlib import Path

_PART = re.compile(r"(?P<name>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
_MOST = 1 << 10


def gguf_parts(path: Path) -> list[Path]:
    """Return the files of the model that `path` belongs to, in order. They need not exist.

    If `path` does not have the name of a part, it is the only file.
    """
    found = _PART.fullmatch(path.name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]) <= _MOST:
        return [path]
    count = int(found["count"])
    return [path.with_name(f"{found['name']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def gguf_name(path: Path) -> str:
    """Return the name of the model in a GGUF file: the file's name without its ending and part number."""
    found = _PART.fullmatch(path.name)
    return found["name"] if found else path.stem


def is_auxiliary(name: str) -> bool:
    """Return True if a GGUF file of this name is not a language model but an image projector or importance matrix."""
    return any(word in name.lower() for word in ("mmproj", "imatrix"))
