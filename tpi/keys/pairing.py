"""The two sides of `tpi pair`.

One machine shows a code and waits; on the other the user types it. Both store the keys.
"""

import socket
import time
from collections.abc import Callable
from contextlib import closing

from tpi.errors import PairingError, UsageError
from tpi.keys.exchange import Introduced, WrongCodeError, as_guest, as_host, new_code, require_code
from tpi.keys.pairinglistener import PairingListener
from tpi.keys.policy import KeyPolicy
from tpi.keys.ring import KeyRing, PairedKey
from tpi.text import plain

PORT = 9993
WAIT_S = 300.0  # seconds to wait for the other machine
_MOST_GUESSES = 3  # wrong guesses; each has its own code
_CONNECT_S = 10.0
_GUEST_S = 5.0  # limit of an exchange with one connection, while others wait
_GUESSING = (
    f"{_MOST_GUESSES} wrong codes were tried; if you did not type them, another machine in this network is guessing: "
    "pair in another network"
)

Show = Callable[[str], None]


def own_introduction(policy: KeyPolicy, name: str = "") -> Introduced:
    """Return this machine's key and name as `invite` and `accept` send them to the other machine."""
    return Introduced(policy.identity.public, plain(name or socket.gethostname(), 64))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens for the other machine. If the usual port is taken, use a free one.

    Raises:
        UsageError: if the address cannot be used.
    """
    try:
        return _server(host, port)
    except OSError as error:
        if port != PORT:
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror}; give another address with --listen"
            ) from error
    return listen(host, 0)


def _server(host: str, port: int) -> socket.socket:
    name = host.strip("[]")
    both = name == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    return socket.create_server((name, port), family=family, backlog=4, dualstack_ipv6=both)


def invite(
    listener: socket.socket, policy: KeyPolicy, own: Introduced, show: Show, wait_s: float = WAIT_S
) -> PairedKey:
    """Wait for the other machine, and store and return its key.

    `show` is called with the code to display, and with a new code after each wrong guess. `own` is this machine's key
    and name.

    Raises:
        PairingError: if no machine came within `wait_s` seconds, or too many guesses were wrong.
    """
    ends, guesses, code = time.monotonic() + wait_s, 0, new_code()
    show(code)
    with closing(PairingListener(listener)) as guests:
        while (came := guests.next(ends)) is not None:
            link, address = came
            with closing(link):
                try:
                    return _keep(policy, as_host(link, code, own, _GUEST_S), address)
                except WrongCodeError:
                    guesses, code = guesses + 1, new_code()
                    if guesses == _MOST_GUESSES:
                        raise PairingError(_GUESSING) from None
                    show(code)
                except (PairingError, OSError):
                    continue  # another program, or a broken connection: no code was tried
    raise PairingError(
        f"no machine connected within {wait_s:.0f} s; start tpi pair again when the other machine is ready"
    )


def accept(host: str, port: int, code: str, policy: KeyPolicy, own: Introduced) -> PairedKey:
    """Connect to a machine that waits with `code`, and store and return its key. `own` is this machine's key and name.

    Raises:
        UsageError: if `code` cannot be a code, or `host` cannot be a host name.
        PairingError: if the code is wrong, or the machine cannot be reached.
    """
    require_code(code)
    try:
        with socket.create_connection((host.strip("[]"), port), _CONNECT_S) as link:
            return _keep(policy, as_guest(link, code, own), host.strip("[]"))
    except UnicodeError:  # raised by Python for host names with empty or overlong labels
        raise UsageError(
            f"{host!r} is not a host name or address; give the one that tpi pair shows on the other machine"
        ) from None
    except OSError as error:
        raise PairingError(
            f"{host}:{port} cannot be reached ({error.strerror or error}); run tpi pair on that machine, and give the "
            "address that it shows"
        ) from error


def _keep(policy: KeyPolicy, other: Introduced, host: str) -> PairedKey:
    if other.key == policy.identity.public:
        raise PairingError("the other machine has this machine's own key, which needs no pairing")
    KeyRing(policy.folder).pair(PairedKey(other.name, other.key, host))
    found = policy.keys.find(other.key)
    assert found is not None
    return found
