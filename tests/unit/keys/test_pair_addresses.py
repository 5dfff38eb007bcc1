"""The address that `tpi pair` takes."""

import pytest

from tpi.errors import UsageError
from tpi.keys.commands import _address
from tpi.keys.pairing import PORT


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("laptop", "laptop", PORT),
        ("192.168.1.7:9000", "192.168.1.7", 9000),
        ("[fe80::2]", "[fe80::2]", PORT),
        ("[fe80::2]:9000", "[fe80::2]", 9000),
    ],
)
def test_an_address_has_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert _address(text) == (host, port)


@pytest.mark.parametrize("text", ["fe80::2", "::1", "laptop:", ":9000", "laptop:http", "laptop:65536"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        _address(text)
