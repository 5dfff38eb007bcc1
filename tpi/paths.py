"""Paths from the user or the environment: a leading `~` is replaced, and invalid paths are refused."""

import os
import pwd
from pathlib import Path
from typing import Any

import click

from tpi.errors import UsageError


def home() -> Path | None:
    """Return the user's home directory: `HOME` if it is an absolute path, else that of the account; None without one.

    In a container a process often has a user number without an account, and no `HOME`.
    """
    chosen = Path(os.environ.get("HOME", ""))
    if chosen.is_absolute():
        return chosen
    try:
        found = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None
    return found if found.is_absolute() else None


def user_path(text: str) -> Path:
    """Return the path that `text` means, with a leading `~` or `~name` replaced.

    Raises:
        UsageError: if `text` is empty, contains a NUL or bytes that are not UTF-8, or begins with an unknown home.
    """
    shown = text[:200].encode(errors="replace").decode()
    if not text:
        raise UsageError("an empty path was given; name a file or a directory")
    if "\0" in text or text != text.encode(errors="replace").decode():
        raise UsageError(f"{shown!r} cannot be used as a path: it contains a NUL or is not UTF-8 text; rename the file")
    first, _, rest = text.partition("/")
    if not first.startswith("~"):
        return Path(text)
    try:
        found = home() if first == "~" else Path(pwd.getpwnam(first[1:]).pw_dir)
    except KeyError:
        found = None
    if found is None:
        if Path(text).exists():
            return Path(text)
        raise UsageError(f"{shown!r} cannot be found: {first[:80]} is not a known home directory; give the whole path")
    return found / rest


def directory_of(variable: str, standard: str, inside_home: str) -> Path:
    """Return the directory that the environment variable `variable` names; if it is not set, `$<standard>/tpi`.

    `standard` is a variable of the XDG specification. If it is not set either, the directory `inside_home` of the
    user's home directory takes its place.

    Raises:
        UsageError: if neither variable is set and the user has no home directory. The message names `variable`.
    """
    if chosen := os.environ.get(variable):
        path = user_path(chosen)
        if _is_something_else(path):
            raise UsageError(f"{variable} is {str(path)!r}, which is not a directory; set it to one")
        return path
    base = Path(os.environ.get(standard, ""))
    if base.is_absolute():  # XDG: relative paths must be ignored
        return base / "tpi"
    found = home()
    if found is None:
        raise UsageError(
            f"this user (number {os.getuid()}) has no home directory; set {variable} to a directory that can be written"
        )
    return found / inside_home / "tpi"


def _is_something_else(directory: Path) -> bool:
    """Return True if the path exists and is not a directory.

    Return False if the path cannot be examined: the first access by the caller reports why.
    """
    try:
        return directory.exists() and not directory.is_dir()
    except OSError:  # no permission, or too long a name
        return False


class UserPath(click.Path):
    """Type of a command line option or argument that is a path."""

    def __init__(self, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(path_type=Path, file_okay=file_okay, dir_okay=dir_okay, readable=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the `Path`. Raise UsageError if `value` cannot be a path."""
        found = user_path(os.fspath(value))
        if not self.file_okay and _is_something_else(found):  # a FIFO, for example
            self.fail(f"{str(found)!r} is not a directory; give another path", param, ctx)
        return super().convert(found, param, ctx)


PATH = UserPath()
FILE = UserPath(dir_okay=False)
DIRECTORY = UserPath(file_okay=False)  # it need not exist
