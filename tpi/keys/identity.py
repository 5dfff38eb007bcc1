"""The key pair of this machine: created on first use, in a file that only its owner can read."""

import json
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from tpi.errors import UsageError
from tpi.keys.text import key_text, parse_key
from tpi.system.private import make_private

FILE = "identity.json"


@dataclass(frozen=True)
class Identity:
    """A CurveZMQ key pair, 32 bytes each. The public half identifies this machine."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Identity({key_text(self.public)})"  # keeps the secret out of logs


def load_identity(folder: Path) -> Identity:
    """Return the identity in `folder`, and create it if there is none.

    Processes that create it at the same time get the same one.

    Raises:
        UsageError: if the file is damaged, not a regular file, readable by others, or cannot be created.
    """
    path = folder / FILE
    require_curve()
    try:
        if not path.exists():
            _make(path)
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{path} is not a regular file; remove it to get another key, and pair again")
        with path.open("rb") as file:
            _require_private(path, os.fstat(file.fileno()).st_mode)
            return _parsed(path, file.read())
    except OSError as error:
        raise UsageError(
            f"cannot store this machine's key in {path}: {error.strerror or error}; set TPI_CONFIG to another directory"
        ) from error


def require_curve() -> None:
    """Raise UsageError if libzmq cannot encrypt, or uses its slow replacement for libsodium."""
    if not zmq.has("curve") or not _has_sodium():
        raise UsageError("this pyzmq comes without libsodium; install its wheel: pip install --force-reinstall pyzmq")


def _has_sodium() -> bool:
    """Return True if libzmq uses libsodium.

    Systems other than Linux do not say, so return True there.
    """
    try:
        return "sodium" in Path("/proc/self/maps").read_text()
    except OSError:
        return True


def _make(path: Path) -> None:
    from tempfile import mkstemp  # imported here because it is needed only once per machine

    public, secret = map(z85.decode, zmq.curve_keypair())
    fields = {"version": 1, "public": key_text(public), "secret": key_text(secret)}
    make_private(path.parent)
    handle, name = mkstemp(prefix=".identity-", dir=path.parent)  # 0600
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(fields, file)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was first: its key pair is the identity
            os.link(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _require_private(path: Path, mode: int) -> None:
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(
            f"other users can read this machine's secret key; run chmod 600 {path}, or remove it and pair again"
        )


def _parsed(path: Path, text: bytes) -> Identity:
    try:
        fields = json.loads(text)
        identity = Identity(parse_key(fields["public"]), parse_key(fields["secret"]))
        if z85.decode(zmq.curve_public(z85.encode(identity.secret))) == identity.public:
            return identity
    except (ValueError, TypeError, LookupError, AttributeError, UsageError):
        pass
    raise UsageError(f"{path} is damaged; remove it to get another key, and pair again")
