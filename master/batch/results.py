"""The output of a batch: one line for each answer.

Each line is written to disk before the next one, so an interrupted run can continue.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import TracebackType
from typing import Any

from master.batch.source import ID, BatchLine, BatchSource
from tpi.errors import UsageError
from tpi.system.private import private

OK = 200  # HTTP status of an answer that is not an error
_BEGINNING = f'{{"id": "{ID}'.encode()  # the beginning of every line written by this module


class BatchResults:
    """A file that one process at a time appends answers to; a context manager.

    `answered` has the ids of the input lines with an answer, `failed` the ids of lines whose answer is an error.
    """

    def __init__(
        self, path: Path, source: BatchSource, names: Sequence[str], warn: Callable[[str], None], retry: bool = False
    ) -> None:
        """Open or create `path`, and remove an incomplete last line. `names` are all names of the model.

        If the last line was incomplete, `warn` is called, and its request is answered again. With `retry`, lines with
        an error are removed, so that their requests are answered again. That includes requests changed since then.

        Raises:
            UsageError: if the file cannot be written, another process writes to it, or a line is not an answer of this
                model to a line of `source`. The message names the line.
            OSError: if the disk has no room for a copy without the failed lines; the file is then unchanged.
        """
        self.path = path
        self.answered: set[str] = set()
        self.failed: set[str] = set()
        self._source, self._names, self._retry = source, names, retry
        self._lines = {line.id: line for line in source.lines}
        if path.exists() and not path.is_file():  # the file is read again and truncated
            raise UsageError(f"{path} is not a regular file; give -o another one")
        self._file = self._open()
        try:
            self._lock()
            end = self._read()
            self._mend(end, warn)
            if retry and self.failed:
                with self._named():
                    self._take_out_failed()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "BatchResults":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, line: BatchLine, fields: dict[str, Any]) -> None:
        """Append the answer to a line and flush it to disk.

        Raises:
            OSError: if the line cannot be written. An incomplete line may remain, which the next run removes.
        """
        said = {"id": line.id, "custom_id": line.custom_id} | fields
        rest = json.dumps(said, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        with self._named():
            while rest:  # a write to a nearly full disk may be partial
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        self.answered.add(line.id)
        if _is_error(said):
            self.failed.add(line.id)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def _open(self) -> Any:
        if self.path.exists() and self.path.samefile(self._source.path):
            raise UsageError(f"{self.path} is the input file; give another -o")
        try:
            return open(self.path, "a+b", buffering=0, opener=private)
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror}; give another -o") from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._file.fileno()).st_ino == self.path.stat().st_ino:  # the path still names the opened file
                return
        except BlockingIOError:
            pass
        except OSError as error:
            raise UsageError(f"cannot lock {self.path}: {error.strerror}; give another -o") from error
        raise UsageError(f"another tpi batch writes to {self.path}; wait for it, or give another -o")

    def _read(self) -> int:
        """Read the ids of the answered lines; return the offset in bytes at which the last whole line ends."""
        end = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    self._check_half(line, number)
                    break
                self._note(line, number)
                end += len(line)
        return end

    def _note(self, raw: bytes, number: int) -> None:
        try:
            said = json.loads(raw)
            name, custom_id, model, failed = said["id"], said["custom_id"], _model_of(said), _is_error(said)
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            raise self._foreign(f"its line {number} is not an answer") from None
        if not isinstance(name, str):
            raise self._foreign(f"its line {number} is not an answer")
        if name not in self._lines and not (failed and self._retry):
            other = f"its line {number} answers {custom_id!r:.80}, but the input has no line with exactly that request"
            raise self._foreign(f"{other}; it is an error, which --retry removes" if failed else other)
        if name in self.answered:
            raise self._foreign(f"its line {number} answers {custom_id!r:.80} a second time")
        if model is not None and model not in self._names:
            known = " or ".join(map(repr, self._names))
            raise self._foreign(f"its line {number} is of the model {model!r:.80}, not {known}")
        self.answered.add(name)
        if failed:
            self.failed.add(name)

    def _check_half(self, raw: bytes, number: int) -> None:
        """Raise UsageError unless the incomplete last line begins an answer, or is zeros left by a power failure."""
        begun = raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw)
        if not begun and raw.strip(b"\0"):
            raise self._foreign(f"its line {number} is not an answer")

    def _foreign(self, what: str) -> UsageError:
        return UsageError(
            f"{self.path} does not belong to {self._source.path}: {what}; give another -o, or remove that file"
        )

    def _mend(self, end: int, warn: Callable[[str], None]) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if size > end:
            warn(f"the last line of {self.path} was incomplete; its request is answered again")
            self._file.truncate(end)
        os.fsync(self._file.fileno())
        self._keep_name()

    def _keep_name(self) -> None:
        """Flush the file's directory to disk, so that the file's name survives a power failure."""
        folder = os.open(self.path.resolve().parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _take_out_failed(self) -> None:
        """Replace the file by a copy without the failed lines; lock the copy before it gets the file's name."""
        target = self.path.resolve()
        with NamedTemporaryFile(prefix=f".{target.name[:32]}-", dir=target.parent, delete=False) as copy:
            try:
                os.fchmod(copy.fileno(), os.fstat(self._file.fileno()).st_mode)
                copy.writelines(self._good_lines())
                copy.flush()
                os.fsync(copy.fileno())
                file = self._in_place(Path(copy.name), target)
            except BaseException:
                Path(copy.name).unlink(missing_ok=True)
                raise
        self._file.close()
        self._file = file
        self.answered -= self.failed
        self.failed.clear()
        self._keep_name()

    def _in_place(self, copy: Path, target: Path) -> FileIO:
        file = copy.open("a+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            copy.replace(target)
        except BaseException:
            file.close()
            raise
        return file

    def _good_lines(self) -> Iterator[bytes]:
        with self.path.open("rb") as whole:
            yield from (line for line in whole if json.loads(line)["id"] not in self.failed)


def _is_error(said: dict[str, Any]) -> bool:
    response = said["response"]
    return response is None or response.get("status_code") != OK


def _model_of(said: dict[str, Any]) -> str | None:
    body = (said["response"] or {}).get("body", {})
    model = body.get("model")
    return model if isinstance(model, str) else None
