"""Text for predictors, in three parts that share no document with each other or with the model's training text.

Predictors learn from the sources of packages that this project requires. A second hash of the names divides the
documents held out of the model's training. One half serves to choose thresholds and widths. The other half is the
test's text: it is stored with the tests' data, and no training uses it.
"""

import re
from collections.abc import Iterator
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from benchmarks.training.corpus import LEFT_OUT, MOST_BYTES, documents, named_documents

PACKAGE, FILE, HELD, TEST = 70_000, 8_000, 16_000, 4_000  # characters of a package, and of a document of each kind
_LONG = 30  # least characters of a line that identifies a copy
_COPIED = 0.02  # share of a file's long lines that other texts may also have
_SMALLEST = 200  # bytes of a file


def learned() -> Iterator[str]:
    """Yield the texts that predictors learn from.

    Files that share lines with the model's text or with the other parts are left out.
    """
    known = set[str]().union(*(_lines(text) for held in (False, True) for text in documents(held)))
    for name in sorted(_packages()):
        taken = 0
        for path in _files(name):
            text = path.read_text(errors="replace")
            lines = _lines(text)
            if taken < PACKAGE and len(lines & known) <= _COPIED * len(lines):
                taken += len(text := _middle(text, FILE))
                yield text


def validation() -> Iterator[str]:
    """Yield the texts with which thresholds and widths are chosen."""
    return (_middle(text, HELD) for name, text in named_documents(held=True) if not _for_test(name))


def unseen_text() -> str:
    """Return the text on which predictors are measured: up to 4000 characters from the middle of each document."""
    return "\n".join(_middle(text, TEST) for name, text in named_documents(held=True) if _for_test(name))


def _for_test(name: str) -> bool:
    return sha256(name.encode()).digest()[1] % 2 == 0


def _middle(text: str, most: int) -> str:
    first = max(0, (len(text) - most) // 2)
    return text[first : first + most]


def _lines(text: str) -> set[str]:
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= _LONG}


def _packages() -> set[str]:
    """Return the packages that the project requires, without its extras."""
    names = (re.match(r"[\w.-]+", wanted) for wanted in metadata.requires("tpi") or () if "extra" not in wanted)
    return {name[0] for name in names if name}


def _files(package: str) -> Iterator[Path]:
    """Yield the source files of `package`, in an order that a hash decides."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return  # for another operating system
    found = [file for file in files if file.suffix == ".py" and not LEFT_OUT & set(file.parts)]
    for file in sorted(found, key=lambda file: sha256(str(file).encode()).digest()):
        path = Path(str(file.locate()))
        if path.exists() and _SMALLEST <= path.stat().st_size <= MOST_BYTES:
            yield path
