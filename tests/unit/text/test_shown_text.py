"""Printed text cannot control a terminal, whichever library prints it."""

import io
import json
import logging
import sys
import traceback

import click
import pytest

from tpi.console import SafeConsole
from tpi.progress import warn
from tpi.system.streams import FilteredStream, filter_output, unfiltered
from tpi.text import harmless, json_text

ORDERS = (
    *map(chr, (*range(9), *range(11, 32), *range(0x7F, 0xA0))),
    *"\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u206f\ufff9\U000e0041\U000e007f",
)
HOSTILE = f"a\x1b]0;owned\x07\x1bcb{''.join(ORDERS)}c\u2028d"
TAMED = "a]0;ownedcbc d"
GOOD = "tab\there, e\u0301, \u05d0\u200d, \U0001f468\u200d\U0001f469\ufe0f, \u200b, zwnj\u200c\n"


def test_orders_go_and_all_else_stays() -> None:
    assert harmless(HOSTILE) == TAMED
    assert harmless(GOOD) == GOOD


def test_json_says_the_same_in_escapes() -> None:
    text = json_text({HOSTILE: [HOSTILE, GOOD]})
    assert harmless(text) == text
    assert json.loads(text) == {HOSTILE: [HOSTILE, GOOD]}
    assert "\u05d0" in text


def filtered(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Return what a process with filtered output prints to stderr from now on."""
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", FilteredStream(shown, wrap=True))
    return shown


def test_every_way_to_print_is_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = filtered(monkeypatch)
    click.echo(HOSTILE, err=True)
    click.UsageError(HOSTILE).show()
    warn(HOSTILE)
    handler = logging.StreamHandler(sys.stderr)
    handler.emit(logging.LogRecord("x", logging.INFO, "x", 1, "%s", (HOSTILE,), None))
    sys.stderr.writelines([HOSTILE, "\n"])
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        traceback.print_exc()
    console = SafeConsole(stderr=True)
    console.print(HOSTILE)
    console.say(HOSTILE)
    assert stderr.getvalue().count(TAMED) == 8
    assert harmless(stderr.getvalue()) == stderr.getvalue()


def test_styles_of_our_own_still_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = filtered(monkeypatch)
    console = SafeConsole(stderr=True)
    assert console.file is unfiltered(sys.stderr) is stderr


def test_the_filter_cannot_be_gone_past_by_the_bytes_below(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(sys, "stderr", None)
    filter_output()
    assert not hasattr(sys.stdout, "buffer")
    click.echo(HOSTILE + "\u00e9")  # click opens the bytes below of a stream that is ASCII
    sys.stdout.flush()
    assert raw.getvalue() == (TAMED + "?\n").encode()
    sys.stderr.close()  # stands for the stderr that was closed
