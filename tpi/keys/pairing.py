"""`tpi pair`'s two sides: one machine shows a code and waits for the other, which types it in. Both keep the keys."""

import socket
import time
from collections.abc import Callable
from contextlib import closing

from tpi.errors import PairingError, UsageError
from tpi.keys.door import Door
from tpi.keys.exchange import Introduced, WrongCodeError, as_guest, as_host, new_code, require_code
from tpi.keys.guests import Guests
from tpi.keys.ring import KeyRing, PairedKey
from tpi.text import plain

PORT = 9993
WAIT_S = 300.0  # for the other machine
_MOST_GUESSES = 3  # wrong ones; each had a code of its own
_CONNECT_S = 10.0
_GUEST_S = 5.0  # for one who connects; others wait meanwhile
_GUESSING = (
    f"{_MOST_GUESSES} wrong codes were tried; if that was not you, somebody in this network is guessing: pair elsewhere"
)

Show = Callable[[str], None]


def own_introduction(door: Door, name: str = "") -> Introduced:
    """What this machine says of itself."""
    return Introduced(door.identity.public, plain(name or socket.gethostname(), 64))


def listen(host: str, port: int) -> socket.socket:
    """A socket on which to wait for the other machine; a free port where the usual one is taken.

    Raises:
        UsageError: if the address cannot be had.
    """
    try:
        return _server(host, port)
    except OSError as error:
        if port != PORT:
            raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; give another --listen") from error
    return listen(host, 0)


def _server(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host.strip("[]"), port), family=family, backlog=4)


def invite(listener: socket.socket, door: Door, own: Introduced, show: Show, wait_s: float = WAIT_S) -> PairedKey:
    """Wait for the other machine under a code, which is shown; each wrong guess makes a new one.

    Raises:
        PairingError: if nobody came in time, or guesses were wrong again and again.
    """
    ends, guesses, code = time.monotonic() + wait_s, 0, new_code()
    show(code)
    with closing(Guests(listener)) as guests:
        while (came := guests.next(ends)) is not None:
            link, address = came
            with closing(link):
                try:
                    return _keep(door, as_host(link, code, own, _GUEST_S), address)
                except WrongCodeError:
                    guesses, code = guesses + 1, new_code()
                    if guesses == _MOST_GUESSES:
                        raise PairingError(_GUESSING) from None
                    show(code)
                except (PairingError, OSError):
                    continue  # a stranger, or a connection that broke: nothing was guessed
    raise PairingError(f"nobody came within {wait_s:.0f} s; start tpi pair again when the other machine is ready")


def accept(host: str, port: int, code: str, door: Door, own: Introduced) -> PairedKey:
    """Go to a machine that waits under `code`, and keep its key.

    Raises:
        UsageError: if it cannot be a code, or `host` cannot be a name.
        PairingError: if the code is wrong, or nobody waits there.
    """
    require_code(code)
    try:
        with socket.create_connection((host.strip("[]"), port), _CONNECT_S) as link:
            return _keep(door, as_guest(link, code, own), host.strip("[]"))
    except UnicodeError:  # what Python says of labels that are empty or too long
        raise UsageError(f"{host!r} is no name or address; give the one that tpi pair shows there") from None
    except OSError as error:
        raise PairingError(
            f"{host}:{port} cannot be reached ({error.strerror or error}); run tpi pair there, and give the address "
            "that it shows"
        ) from error


def _keep(door: Door, other: Introduced, host: str) -> PairedKey:
    if other.key == door.identity.public:
        raise PairingError("that is this machine itself, which trusts its own key anyway")
    KeyRing(door.folder).pair(PairedKey(other.name, other.key, host))
    found = door.keys.find(other.key)
    assert found is not None
    return found
