"""`tpi pair` and `tpi keys`: which machines are trusted, pairing with them, and revoking them."""

import socket
from datetime import datetime, timezone

import click

from tpi.errors import UsageError
from tpi.keys.policy import KeyPolicy
from tpi.keys.ring import KeyRing, PairedKey
from tpi.keys.text import key_text, parse_key, short_key
from tpi.text import plain


@click.command()
@click.argument("address", required=False, metavar="[HOST[:PORT]]")
@click.argument("code", required=False)
@click.option("--listen", default="0.0.0.0:9993", show_default=True, help="Where to wait for the other machine.")
@click.option("--key", metavar="KEY", help="Trust this key of another machine, as its `tpi keys show` prints it.")
@click.option(
    "--name", help="Name of this machine on the other one; with --key, name of the other machine on this one."
)
def pair(address: str | None, code: str | None, listen: str, key: str | None, name: str | None) -> None:
    """Have two machines trust each other, once: `tpi pair` on one, `tpi pair HOST CODE` on the other.

    The first shows a code that is good for one guess. Alternatively, give each machine the other's key with --key.
    """
    policy = KeyPolicy()
    if key is not None:
        if address is not None:
            raise UsageError("--key cannot be combined with an address; give --key, or an address and a code")
        _say_paired(policy, _by_key(policy, key, name))
    elif address is None:
        _invite(policy, listen, name)
    elif code is None:
        raise UsageError("a code is missing; give the one that tpi pair shows on the other machine: tpi pair HOST CODE")
    else:
        from tpi.keys.pairing import accept, own_introduction

        host, port = _address(address)
        _say_paired(policy, accept(host, port, code, policy, own_introduction(policy, name or "")))


@click.group()
def keys() -> None:
    """Show this machine's key and manage the machines that it trusts."""


@keys.command("show")
def show_key() -> None:
    """Print this machine's whole key, by which other machines recognise it."""
    click.echo(key_text(KeyPolicy().identity.public))


@keys.command("list")
def list_keys() -> None:
    """List the machines that this one trusts."""
    policy = KeyPolicy()
    paired = KeyRing(policy.folder).read().paired
    width = max([len(one.name) for one in paired], default=0)
    for one in paired:
        day = datetime.fromtimestamp(one.since, timezone.utc).astimezone().strftime("%Y-%m-%d")
        click.echo(f"{one.name:<{width}}  {short_key(one.key)}  since {day}{f', at {one.host}' if one.host else ''}")
    if not paired:
        click.echo("no machine is paired; run tpi pair on another one, and then on this one", err=True)


@keys.command()
@click.argument("which", metavar="NAME|KEY")
def revoke(which: str) -> None:
    """Stop trusting a machine. Its open connections end within a second."""
    gone = KeyRing(KeyPolicy().folder).revoke(which)
    click.echo(f"{gone.name} ({short_key(gone.key)}) is no longer trusted; revoke this machine on that one, too")


def _by_key(policy: KeyPolicy, key: str, name: str | None) -> PairedKey:
    other = parse_key(key)
    if other == policy.identity.public:
        raise UsageError("this is the machine's own key; give the key of the other machine")
    KeyRing(policy.folder).pair(PairedKey(plain(name or ""), other))
    found = policy.keys.find(other)
    assert found is not None
    return found


def _invite(policy: KeyPolicy, listen_at: str, name: str | None) -> None:
    from tpi.keys.pairing import WAIT_S, invite, listen, own_introduction

    host, port = _address(listen_at)
    with listen(host, port) as listener:
        at = f"{_shown(host)}:{listener.getsockname()[1]}"
        click.echo(f"waiting for {WAIT_S / 60:.0f} minutes; on the other machine run:", err=True)

        shown: list[str] = []

        def show(code: str) -> None:
            if shown:
                click.echo("a wrong code was tried, so the one above is no longer valid; run instead:", err=True)
            shown.append(code)
            click.echo(f"tpi pair {at} {code}")

        _say_paired(policy, invite(listener, policy, own_introduction(policy, name or ""), show))


def _shown(host: str) -> str:
    """Return `host` or, if it is a wildcard, an address at which other machines may reach this one."""
    if host not in ("0.0.0.0", "::", "[::]"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: the system picks the interface
            return str(probe.getsockname()[0])
        except OSError:  # no default route, for example if a cable joins two machines
            return _first_address() or socket.gethostname()


def _first_address() -> str:
    import ifaddr

    found = [str(ip.ip) for adapter in ifaddr.get_adapters() for ip in adapter.ips if ip.is_IPv4]
    return next((one for one in found if not one.startswith("127.")), "")


def _address(text: str) -> tuple[str, int]:
    from tpi.keys.pairing import PORT

    host, separator, port = text.rpartition(":")
    if not separator or (text.startswith("[") and text.endswith("]")):
        return text, PORT
    if not host or (":" in host and not host.startswith("[")) or not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            f"{text!r} is not an address; write HOST, HOST:PORT or [IPV6]:PORT, for example 192.168.1.7:{PORT}"
        )
    return host, int(port)


def _say_paired(policy: KeyPolicy, other: PairedKey) -> None:
    click.echo(
        f"paired with {other.name} ({short_key(other.key)}); this machine is {short_key(policy.identity.public)}",
        err=True,
    )
