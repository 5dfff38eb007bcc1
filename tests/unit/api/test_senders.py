"""Senders are told apart by key if there are several keys, else by address; caches and responses are per sender."""

import asyncio

import pytest

from master.api.answers.turns import FairExecutor, FairLock
from master.api.failures import RequestError
from master.api.openai.store import ResponseStore
from master.api.senders import network_of, sender_of
from tpi.errors import BusyError

TURN = {"role": "user", "content": "x" * 100}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.168.1.7", "192.168.1.7", True),
        ("192.168.1.7", "192.168.1.8", False),
        ("::ffff:192.168.1.7", "192.168.1.7", True),
        ("2001:db8:1:2:3::4", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::4", "2001:db8:1:3::4", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("testclient", "testclient", True),
    ],
)
def test_places_are_shared_by_network(one: str, other: str, same: bool) -> None:
    assert (network_of(one) == network_of(other)) is same


def test_owners_are_whole_addresses_and_keys() -> None:
    one, other = (sender_of(f"2001:db8::{host}", "", (), False) for host in (1, 2))
    assert one.name == other.name
    assert one.salt != other.salt
    assert one.owner != other.owner
    assert sender_of("10.0.0.1", "mine", (), False).salt != sender_of("10.0.0.1", "yours", (), False).salt


def test_with_several_keys_the_key_is_the_client() -> None:
    here, there = (sender_of(address, "b", ("a", "b"), False) for address in ("10.0.0.1", "10.0.0.2"))
    assert here == there
    assert here.name != sender_of("10.0.0.1", "a", ("a", "b"), False).name


def test_a_requests_salt_counts_where_prefixes_are_shared() -> None:
    shared = sender_of("10.0.0.1", "", (), True)
    assert shared.salted((None, None)) == b""
    salts = [shared.salted(more) for more in (("x", None), ("y", None), ("x", "z"))]
    assert len({b"", *salts}) == 4
    assert shared.owner != sender_of("10.0.0.2", "", (), True).owner


def test_responses_are_found_by_their_owner_alone() -> None:
    kept = ResponseStore()
    kept.keep(b"a", "one", [TURN], {"item": TURN})
    assert kept.of(b"a").find("one") == (TURN,)
    assert kept.of(b"a").known == {"item": TURN}
    assert kept.of(b"b").known == {}
    with pytest.raises(RequestError):
        kept.of(b"b").find("one")


@pytest.mark.parametrize(("most", "characters"), [(8, 1 << 20), (1000, 900)])
def test_an_owner_of_many_responses_loses_its_own(most: int, characters: int) -> None:
    kept = ResponseStore(most, characters)
    kept.keep(b"a", "mine", [TURN], {})
    for number in range(100):
        kept.keep(b"b", str(number), [TURN], {str(number): TURN})
    assert kept.of(b"a").find("mine") == (TURN,)
    assert kept.of(b"b").find("99") == (TURN,)
    assert 4 < len(kept.of(b"b")) < 9
    assert len(kept.of(b"b").known) == len(kept.of(b"b"))


async def _order(turns: FairLock, clients: str) -> list[str]:
    """Return the clients in the order of their turns, if all ask at once while one has the turn."""
    came = list[str]()

    async def ask(client: str) -> None:
        async with turns.turn(client):
            came.append(client)
            await asyncio.sleep(0)

    await asyncio.gather(*(ask(client) for client in clients), return_exceptions=True)
    return came


def test_clients_take_turns_on_a_thread() -> None:
    assert asyncio.run(_order(FairLock(100), "aaaaabbc")) == list("aabcabaa")
    assert sorted(asyncio.run(_order(FairLock(3), "aaaaaab"))) == list("aaab")  # the others are told to come back


def test_a_call_that_is_given_up_passes_its_turn_on() -> None:
    async def run() -> list[object]:
        turns, thread = FairLock(100), FairExecutor("test", 1)
        first, second, third = (asyncio.ensure_future(_order(turns, client)) for client in "abc")
        await asyncio.sleep(0)
        second.cancel()
        done = await asyncio.gather(first, second, third, return_exceptions=True)
        calls = [asyncio.ensure_future(thread.run("a", lambda: 5)) for _ in range(3)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        thread.close()
        return [*done[::2], *map(type, found)]

    assert asyncio.run(run()) == [["a"], ["c"], int, int, BusyError]


def test_calls_that_are_given_up_leave_their_places() -> None:
    """They do not count as waiting, others can still be refused, and no two clients have the turn at once."""

    async def run() -> list[str]:
        turns, came, go = FairLock(3), list[str](), asyncio.Event()
        inside = most = 0

        async def ask(client: str) -> None:
            nonlocal inside, most
            async with turns.turn(client):
                inside += 1
                most = max(most, inside)
                await go.wait()
                await asyncio.sleep(0)
                inside -= 1
                came.append(client)

        first = asyncio.ensure_future(ask("a"))
        await asyncio.sleep(0)
        for _ in range(20):
            gone = [asyncio.ensure_future(ask("b")) for _ in range(3)]
            await asyncio.sleep(0)
            for one in gone:
                one.cancel()
            late = asyncio.ensure_future(ask("b"))  # comes before those have left
            await asyncio.sleep(0)
            late.cancel()
            await asyncio.gather(late, *gone, return_exceptions=True)
        over = [asyncio.ensure_future(ask("d")) for _ in range(4)]
        await asyncio.sleep(0)
        over[-1].cancel()  # it is turned away and given up at once
        go.set()
        await asyncio.gather(first, *over[:-1])
        await asyncio.gather(over[-1], return_exceptions=True)
        assert most == 1
        return came

    assert asyncio.run(run()) == ["a", "d", "d", "d"]
