"""`tpi pair` and `tpi keys`: who is trusted, how it came to that, and how it ends."""

import socket
from datetime import datetime, timezone

import click

from tpi.errors import UsageError
from tpi.keys.door import Door
from tpi.keys.ring import KeyRing, PairedKey
from tpi.keys.text import key_text, parse_key, short_key
from tpi.text import plain


@click.command()
@click.argument("address", required=False, metavar="[HOST[:PORT]]")
@click.argument("code", required=False)
@click.option("--listen", default="0.0.0.0:9993", show_default=True, help="Where to wait for the other machine.")
@click.option("--key", metavar="KEY", help="Trust this key of another machine, as its tpi keys show prints it.")
@click.option("--name", help="What this machine is called there; with --key what the other one is called here.")
def pair(address: str | None, code: str | None, listen: str, key: str | None, name: str | None) -> None:
    """Have two machines trust each other, once: `tpi pair` on one, `tpi pair HOST CODE` on the other.

    The first shows a code that is good for one guess. Instead, both can be told the other's key with --key.
    """
    door = Door()
    if key is not None:
        if address is not None:
            raise UsageError("give --key, or an address and a code")
        _say_paired(door, _by_key(door, key, name))
    elif address is None:
        _invite(door, listen, name)
    elif code is None:
        raise UsageError("give the code too that tpi pair shows on the other machine: tpi pair HOST CODE")
    else:
        from tpi.keys.pairing import accept, own_introduction

        host, port = _address(address)
        _say_paired(door, accept(host, port, code, door, own_introduction(door, name or "")))


@click.group()
def keys() -> None:
    """This machine's key, and those of the machines that it trusts."""


@keys.command("show")
def show_key() -> None:
    """Print this machine's key, all of it: by it others know this machine."""
    click.echo(key_text(Door().identity.public))


@keys.command("list")
def list_keys() -> None:
    """List the machines that this one trusts."""
    door = Door()
    paired = KeyRing(door.folder).read().paired
    width = max([len(one.name) for one in paired], default=0)
    for one in paired:
        day = datetime.fromtimestamp(one.since, timezone.utc).astimezone().strftime("%Y-%m-%d")
        click.echo(f"{one.name:<{width}}  {short_key(one.key)}  since {day}{f', at {one.host}' if one.host else ''}")
    if not paired:
        click.echo("no machine is paired; run tpi pair on another one, and then here", err=True)


@keys.command()
@click.argument("which", metavar="NAME|KEY")
def revoke(which: str) -> None:
    """Trust a machine no more: connections that stand end within a second."""
    gone = KeyRing(Door().folder).revoke(which)
    click.echo(f"{gone.name} ({short_key(gone.key)}) is trusted no more; revoke this machine there, too")


def _by_key(door: Door, key: str, name: str | None) -> PairedKey:
    other = parse_key(key)
    if other == door.identity.public:
        raise UsageError("that is this machine's own key; give the other machine's")
    KeyRing(door.folder).pair(PairedKey(plain(name or ""), other))
    found = door.keys.find(other)
    assert found is not None
    return found


def _invite(door: Door, listen_at: str, name: str | None) -> None:
    from tpi.keys.pairing import WAIT_S, invite, listen, own_introduction

    host, port = _address(listen_at)
    with listen(host, port) as listener:
        at = f"{_shown(host)}:{listener.getsockname()[1]}"
        click.echo(f"waiting for {WAIT_S / 60:.0f} minutes; on the other machine say:", err=True)

        shown: list[str] = []

        def show(code: str) -> None:
            if shown:
                click.echo("somebody tried a wrong code, so the one above is worth nothing now; say:", err=True)
            shown.append(code)
            click.echo(f"tpi pair {at} {code}")

        _say_paired(door, invite(listener, door, own_introduction(door, name or ""), show))


def _shown(host: str) -> str:
    """An address under which others may reach this machine, for one that stands for all of them."""
    if host not in ("0.0.0.0", "::", "[::]"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: the system picks the interface
            return str(probe.getsockname()[0])
        except OSError:  # no way out of this network, as where a cable joins two machines
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
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text!r} is no address; write HOST or HOST:PORT, for example 192.168.1.7:{PORT}")
    return host, int(port)


def _say_paired(door: Door, other: PairedKey) -> None:
    click.echo(
        f"paired with {other.name} ({short_key(other.key)}); this machine is {short_key(door.identity.public)}",
        err=True,
    )
