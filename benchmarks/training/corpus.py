"""The training text: documentation and sources of the running Python, in a fixed order.

Whole files are held out, chosen by a hash of their name, so that training sees none of their lines.
"""

import ast
import sysconfig
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "encodings", "lib2to3", "__pycache__"})
HELD_OUT = 24  # one file in so many
TOPICS = "pydoc_data/topics.py"
MOST_BYTES = 200_000  # of one file; longer ones are tables


def held_out(name: str) -> bool:
    """Return True if the file of this name (a relative path) is held out of training."""
    return sha256(name.encode()).digest()[0] % HELD_OUT == 0


def documents(held: bool) -> Iterator[str]:
    """Yield the texts for training, or the held-out texts if `held`; each is one file or one topic."""
    return (text for _, text in named_documents(held))


def named_documents(held: bool) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the documents for training, or of the held-out documents if `held`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if LEFT_OUT & set(Path(name).parts):
            continue
        if name == TOPICS:
            yield from ((topic, text) for topic, text in _topics(path) if held_out(topic) == held)
        elif held_out(name) == held and path.stat().st_size <= MOST_BYTES:
            yield name, path.read_text(errors="replace")


def _topics(path: Path) -> list[tuple[str, str]]:
    """Return the topics of Python's reference manual and their texts, as `help()` shows them."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return sorted(ast.literal_eval(node.value).items())
    return []
