"""Checks before and after a request: refused requests, entries of the log, and unexpected errors."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from master.api import command
from master.api.failures import CLIENT_GONE
from master.api.guard import Access, Guard
from master.api.openai import completions
from master.api.state import ServeLimits
from master.api.streams import EventStream
from tpi.errors import UsageError


async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
    pytest.fail("it got in")


def asked(
    messages: list[Message],
    path: str = "/v1/chat/completions",
    access: Access = Access(),  # noqa: B008
    hosts: Sequence[str] = ("localhost",),
) -> int:
    """Return the status of a POST whose client sends these parts and leaves; the application must not be called."""
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "http", "method": "POST", "path": path, "client": ("127.0.0.1", 1)}
    scope["headers"] = [*((b"host", host.encode()) for host in hosts), (b"content-type", b"application/json")]
    asyncio.run(Guard(nobody, access, ServeLimits(), lambda _: False)(scope, receive, send))
    return int(sent[0]["status"])


def test_a_body_cut_off_is_not_answered_even_if_it_parses() -> None:
    assert asked([{"type": "http.request", "body": b'{"messages": []}', "more_body": True}]) == CLIENT_GONE


ADDRESSES = ["127.0.0.1", "127.0.0.1:8080", "[::1]", "[::1]:8080", "[fe80::1]", "[::ffff:10.0.0.1]:1", "192.0.2.7:80"]
NAMES = ["localhost", "LocalHost:8080", "laptop.local", "Laptop.local:8080"]
ODD = [
    "", "evil.example", "[fe80::1%25evil.example]", "[fe80::1%evil.example]:80", "fe80::1%evil.example", "127.0.0.1%1",
    "::1", "[::1", "::1]", "[[::1]]", "[127.0.0.1]", "[localhost]", "127.0.0.1:8080:80", "127.0.0.1:", "127.0.0.1:x",
    "localhost@evil.example", "evil.example@localhost", "localhost/evil", "localhost evil", "127.1", "2130706433",
    "0x7f.1", "localhost:123456", "localhost,evil.example",
]  # fmt: skip


@pytest.mark.parametrize("host", [*ADDRESSES, *NAMES, *ODD])
def test_only_addresses_and_known_names_are_hosts(host: str) -> None:
    """An accepted host is then refused by the next check, because there is no key."""
    wanted = 403 if host in ODD else 401
    assert asked([], access=Access(("secret",), ("laptop.local",)), hosts=[host]) == wanted


@pytest.mark.parametrize("hosts", [[], ["localhost", "evil.example"], ["localhost", "localhost"]])
def test_a_request_has_one_host(hosts: list[str]) -> None:
    assert asked([], access=Access(("secret",)), hosts=hosts) == 403


def test_a_stranger_writes_neither_log_lines_nor_terminal_codes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tpi.serve"):
        assert asked([], "/x\n2026 forged\x1b]0;mine\x07", Access(("secret",))) == 401
    (line,) = caplog.messages
    assert "POST /x 2026 forged?]0;mine? 401" in line


def test_an_unforeseen_fault_ends_a_stream_and_is_raised() -> None:
    """The stream must not end as if the answer were complete."""
    sent: list[Message] = []

    async def events() -> AsyncIterator[str]:
        yield "data: 1\n\n"
        raise ZeroDivisionError

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(EventStream(events(), [])({"type": "http"}, receive, send))
    assert [message.get("more_body") for message in sent] == [None, True]


def test_an_unforeseen_fault_ends_the_running_answers() -> None:
    ended: list[str] = []

    class Service:
        async def text(self, ask: str) -> list[SimpleNamespace]:
            if ask == "third":
                raise ZeroDivisionError
            return [SimpleNamespace(cancel=lambda: ended.append(ask))]

    state: Any = SimpleNamespace(service=Service())
    asks: Any = ["first", "second", "third"]
    with pytest.raises(ZeroDivisionError):
        asyncio.run(completions._begun(state, asks))
    assert ended == ["first", "second"]


@pytest.mark.parametrize("key", [" secret", "secret\n", "s\u00e9cret", "\x1b"])
def test_a_key_that_no_header_carries_is_refused_at_the_start(key: str) -> None:
    with pytest.raises(UsageError, match="printable ASCII"):
        command._keys((key,))


def test_keys_are_those_of_the_flags_else_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(command.KEY_VARIABLE, raising=False)
    assert [command._keys(given) for given in ((), ("",), ("a key", "b", "b"))] == [(), (), ("a key", "b")]
    monkeypatch.setenv(command.KEY_VARIABLE, "c")
    assert [command._keys(given) for given in ((), ("",), ("a",))] == [("c",), ("c",), ("a",)]
