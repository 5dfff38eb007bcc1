"""Exchange of two machines' keys, protected by a short code: SPAKE2 (RFC 9382). A code is good for one guess.

A wrong guess reveals only that it was wrong, and an eavesdropper learns nothing. Both sides have to prove that they
know the code before either trusts the other's key:

    guest -> host: its SPAKE2 message
    host -> guest: its SPAKE2 message
    guest -> host: its key and name, proved
    host -> guest: its key and name, proved      (only if the guest's proof was right)
    guest -> host: done                          (only if the host's proof was right)
"""

import hmac
import secrets
import socket
import time
from dataclasses import dataclass
from hashlib import sha256

from spake2 import SPAKE2_A, SPAKE2_B
from spake2.spake2 import SPAKEError

from tpi.errors import PairingError, UsageError
from tpi.keys.text import KEY_BYTES
from tpi.text import NAME_CHARACTERS, plain

_GREETING = b"tpi pairs 1\n"
_DONE = b"done"
_CODE_DIGITS = 6
_PROOF_BYTES = 32
_MOST_BYTES = 2048  # limit of one message
_LASTS_S = 20.0  # limit of a whole exchange, however slowly the other end sends
_FIRST_S = 2.0  # limit of the guest's first message, which a guest sends as soon as it is connected


@dataclass(frozen=True)
class Introduced:
    """The key and name of a machine that has proved that it knows the code."""

    key: bytes
    name: str


def new_code() -> str:
    """Return a new code of six digits, for example `482-193`."""
    digits = f"{secrets.randbelow(10**_CODE_DIGITS):0{_CODE_DIGITS}}"
    return f"{digits[:3]}-{digits[3:]}"


def require_code(code: str) -> None:
    """Refuse text that cannot be a code before it is tried, because a try would cost the other side one of its guesses.

    Raises:
        UsageError: if `code` does not have six digits.
    """
    if len(_digits(code)) != _CODE_DIGITS or not code.isascii():
        raise UsageError(
            f"{plain(code)!r} is not a code; give the {_CODE_DIGITS} digits that tpi pair shows on the other machine"
        )


def as_guest(link: socket.socket, code: str, own: Introduced, lasts_s: float = _LASTS_S) -> Introduced:
    """Run the guest's side on `link`, a connection to the host. Return the host's key and name.

    `own` is this machine's key and name.

    Raises:
        PairingError: if the code is wrong, or the other end does not follow the protocol.
        OSError: if the connection breaks, or the exchange takes longer than `lasts_s` seconds.
    """
    side = SPAKE2_A(_digits(code), idA=b"guest", idB=b"host")
    opening, line = side.start(), _Line(link, lasts_s)  # computed before it is sent: a host waits only a short time
    line.greet()
    line.send(opening)
    if not line.greeted():
        raise PairingError("the other end is not tpi pair; give the address that tpi pair shows")
    shared = _finish(side, line.receive())
    line.send(_proved(shared, b"guest", own))
    try:
        host = _checked(shared, b"host", line.receive())
    except (PairingError, OSError):
        raise PairingError("the code is wrong; look at the new one that tpi pair shows on the other machine") from None
    line.send(_DONE)
    return host


def as_host(link: socket.socket, code: str, own: Introduced, lasts_s: float = _LASTS_S) -> Introduced:
    """Run the host's side on `link`, a connection from a guest. Return the guest's key and name.

    `own` is this machine's key and name.

    Raises:
        WrongCodeError: if the guest guessed wrong. The code must not be used again.
        PairingError: if the other end does not follow the protocol.
        OSError: if the connection breaks, or the exchange takes longer than `lasts_s` seconds.
    """
    first, side = _Line(link, min(_FIRST_S, lasts_s)), SPAKE2_B(_digits(code), idA=b"guest", idB=b"host")
    if not first.greeted():
        raise PairingError("a program that is not tpi pair has connected")
    theirs, line = first.receive(), _Line(link, lasts_s)
    line.greet()
    line.send(side.start())
    shared = _finish(side, theirs)
    guest = _checked(shared, b"guest", line.receive())
    line.send(_proved(shared, b"host", own))
    if line.receive() != _DONE:
        raise PairingError("the other machine ended the connection before pairing was complete")
    return guest


class WrongCodeError(PairingError):
    """Raised if the other end does not know the code."""


def _digits(code: str) -> bytes:
    return "".join(one for one in code if one.isdecimal()).encode()


def _finish(side: SPAKE2_A | SPAKE2_B, theirs: bytes) -> bytes:
    try:
        return bytes(side.finish(theirs))
    except (SPAKEError, ValueError, AssertionError) as error:
        raise PairingError("the other end sent an invalid SPAKE2 message") from error


def _proved(shared: bytes, side: bytes, one: Introduced) -> bytes:
    said = one.key + one.name.encode()
    return _proof(shared, side, said) + said


def _proof(shared: bytes, side: bytes, said: bytes) -> bytes:
    return hmac.digest(shared, b"tpi pairing, " + side + b": " + said, sha256)


def _checked(shared: bytes, side: bytes, message: bytes) -> Introduced:
    proof, said = message[:_PROOF_BYTES], message[_PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(shared, side, said)):
        raise WrongCodeError("a wrong code was tried")
    key, name = said[:KEY_BYTES], said[KEY_BYTES:]
    if len(key) != KEY_BYTES:
        raise PairingError("the other end sent an incomplete key")
    return Introduced(key, plain(name.decode(errors="replace"), NAME_CHARACTERS))


class _Line:
    """Messages over a connection, with one deadline for all of them.

    The deadline keeps a slow sender from blocking other guests.
    """

    def __init__(self, link: socket.socket, lasts_s: float) -> None:
        self._link, self._ends = link, time.monotonic() + lasts_s

    def greet(self) -> None:
        self._in_time().sendall(_GREETING)

    def greeted(self) -> bool:
        return self._read(len(_GREETING)) == _GREETING

    def send(self, data: bytes) -> None:
        self._in_time().sendall(len(data).to_bytes(2, "big") + data)

    def receive(self) -> bytes:
        size = int.from_bytes(self._read(2), "big")
        if size > _MOST_BYTES:
            raise PairingError(f"the other end sent a message of {size} bytes; the limit is {_MOST_BYTES}")
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (piece := self._in_time().recv(size - len(data))):
                raise PairingError("the other end closed the connection")
            data += piece
        return data

    def _in_time(self) -> socket.socket:
        """Return the connection with its timeout set to the time that is left until the deadline."""
        if (left := self._ends - time.monotonic()) <= 0:
            raise TimeoutError("the other end did not answer in time")
        self._link.settimeout(left)
        return self._link
