"""One tiny server for a module's tests."""

from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.support.serving import Served, client, tiny_server
from tpi.pack.reader import Pack


@pytest.fixture(scope="module")
def served(tiny_pack: Callable[..., Pack], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tiny_server(tiny_pack("llama"), tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with client(served) as http:
        yield http
