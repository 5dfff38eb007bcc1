"""Reading a prompt from the command line, a file, or standard input; unusable text is refused."""

import sys
from pathlib import Path
from typing import BinaryIO

from tpi.errors import UsageError
from tpi.paths import user_path

MOST_BYTES = 64 << 20  # limit of a prompt; no context is longer
STDIN = "-"
_WAYS = 'give it after the model (tpi run MODEL "TEXT"), with -p TEXT, with -f FILE, or on standard input'


def read_prompt(prompt: str | None, file: str | None, raw: bool = False) -> str:
    """Return the prompt given by `-p prompt` or `-f file`; without either, read it from standard input.

    The last line end is removed, unless `raw`.

    Raises:
        UsageError: if there is no prompt, two are given, or it is empty, not UTF-8, too long or not readable.
    """
    if prompt is not None and file is not None:
        raise UsageError("a prompt on the command line and -f exclude each other; give one prompt")
    if prompt is not None and prompt != STDIN:
        text = checked_text(prompt, "the prompt")
    else:
        read = _read_stdin(asked=STDIN in (prompt, file)) if file in (None, STDIN) else _read_file(user_path(str(file)))
        text = read if raw else read.removesuffix("\n").removesuffix("\r")
    if not (text if raw else text.strip()):
        raise UsageError(f"the prompt is empty; {_WAYS}")
    return text


def checked_text(text: str, what: str) -> str:
    """Return `text` if it is valid. It comes from the command line; `what` names it in errors.

    Raises:
        UsageError: if the bytes were not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not UTF-8 text; convert it first, for example with iconv") from None
    return text


def decoded(data: bytes, what: str) -> str:
    """Return `data` decoded from UTF-8, without a byte-order mark; `what` names it in errors.

    Raises:
        UsageError: if the bytes are not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{what} is not UTF-8 text (byte {error.start}); convert it first, for example with iconv"
        ) from None


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return _read(file, str(path))
    except OSError as error:
        raise UsageError(f"cannot read the prompt from {path}: {error.strerror}; {_WAYS}") from error


def _read_stdin(asked: bool) -> str:
    if sys.stdin is None or (sys.stdin.isatty() and not asked):
        raise UsageError(f"there is no prompt; {_WAYS}")
    try:
        return _read(sys.stdin.buffer, "standard input")
    except OSError as error:
        raise UsageError(f"cannot read the prompt from standard input: {error.strerror}; {_WAYS}") from error


def _read(file: BinaryIO, what: str) -> str:
    data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise UsageError(f"{what} has more than {MOST_BYTES >> 20} MiB, too much for a prompt; give a shorter one")
    return decoded(data, what)
