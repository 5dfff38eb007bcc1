"""The version of the code that a figure measured: a commit for people, and a digest of the measured files.

The digest needs no git, and does not change when a commit gets another name.
"""

import hashlib
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SOURCES = {".py", ".cpp", ".hpp", ".h"}
UNKNOWN = ""


def digest(measures: Iterable[str], root: Path = ROOT) -> str:
    """Hash all sources in the folders and files `measures`, relative to `root`; return 16 hexadecimal digits."""
    found = hashlib.sha256()
    for path in sorted({file for name in measures for file in _sources(root / name)}):
        found.update(f"{path.relative_to(root).as_posix()}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def commit(root: Path = ROOT) -> str:
    """Return the first 12 digits of the checked-out commit, followed by + if files were changed; or `UNKNOWN`."""
    name = _git(root, "rev-parse", "--short=12", "HEAD")
    if not name:
        return UNKNOWN
    return f"{name}+" if _git(root, "status", "--porcelain", "--untracked-files=no") else name


def changes_since(name: str, measures: Iterable[str], root: Path = ROOT) -> int | None:
    """Count the commits after the commit `name` that changed `measures`; None if git cannot tell."""
    if name == UNKNOWN:
        return None
    counted = _git(root, "rev-list", "--count", f"{name.rstrip('+')}..HEAD", "--", *measures)
    return int(counted) if counted else None


def _sources(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (file for file in path.rglob("*") if file.suffix in _SOURCES and "__pycache__" not in file.parts)


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return UNKNOWN
    return done.stdout.strip() if done.returncode == 0 else UNKNOWN
