"""Names of the parts of a GGUF model that is split into several files: `name-00001-of-00003.gguf`."""

import re
from pathlib import Path

_PART = re.compile(r"(?P<name>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
_MOST = 1 << 10


def gguf_parts(path: Path) -> list[Path]:
    """Return all parts of the model that the file `path` is, or is one of, in order; whether they exist or not."""
    found = _PART.fullmatch(path.name)
    if found is None or not 1 <= int(found["number"]) <= int(found["count"]) <= _MOST:
        return [path]
    count = int(found["count"])
    return [path.with_name(f"{found['name']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def gguf_name(path: Path) -> str:
    """Return what the model in a GGUF file is called: the file's name without its ending and the number of a part."""
    found = _PART.fullmatch(path.name)
    return found["name"] if found else path.stem


def is_auxiliary(name: str) -> bool:
    """Return True for the name of a GGUF file that is not a model: a projector of images, or what quantising needs."""
    return any(word in name.lower() for word in ("mmproj", "imatrix"))
