"""A client learns nothing of another client's requests: caches, stored responses and replays are per client."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.serving import Served, said, tiny_server
from tpi.pack.reader import Pack

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SECRET = "The number of the lock in the cellar is 4711, and it has to stay between the two of us."


@pytest.fixture(scope="module")
def several(tiny_pack: Callable[..., Pack], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tiny_server(tiny_pack("llama"), tmp_path_factory.mktemp("several"), key=None) as served:
        yield served


def asker(served: Served, address: str, key: str | None = None) -> httpx.Client:
    """Return a client at an address of its own."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    transport = httpx.HTTPTransport(local_address=address)
    return httpx.Client(base_url=served.url, headers=headers, timeout=60, transport=transport)


def cached(client: httpx.Client, **more: Any) -> int:
    """Return the number of tokens of the secret that were found in the cache."""
    usage = client.post(CHAT, json=said(SECRET, **more)).json()["usage"]
    found: int = usage["prompt_tokens_details"]["cached_tokens"]
    return found


def test_cached_tokens_are_those_of_the_same_client(several: Served) -> None:
    with (
        asker(several, "127.0.0.1") as mine,
        asker(several, "127.0.0.2") as other,
        asker(several, "127.0.0.1", "a key") as keyed,
    ):
        assert cached(mine) == 0
        assert cached(mine) > 32
        assert cached(other) == 0
        assert cached(keyed) == 0
        assert cached(keyed) > 32
        for field in ("prompt_cache_key", "cache_salt"):
            assert cached(mine, **{field: "one"}) == 0
            assert cached(mine, **{field: "one"}) > 32
            assert cached(mine, **{field: "two"}) == 0


def test_clients_that_trust_each_other_share_prefixes(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with (
        tiny_server(tiny_pack("llama"), tmp_path, key=None, share_prefixes=True) as served,
        asker(served, "127.0.0.1") as mine,
        asker(served, "127.0.0.2") as other,
    ):
        assert cached(mine) == 0
        assert cached(other) > 32
        assert cached(other, cache_salt="own") == 0


def test_a_stored_response_is_its_owners(several: Served) -> None:
    with asker(several, "127.0.0.1") as mine, asker(several, "127.0.0.2") as other:
        body: dict[str, Any] = {"input": "Hello", "max_output_tokens": 4, "temperature": 0}
        first = mine.post(RESPONSES, json=body).json()
        further = body | {"previous_response_id": first["id"]}
        refused = other.post(RESPONSES, json=further)
        assert refused.status_code == 404
        assert refused.json()["error"]["param"] == "previous_response_id"
        item = {"type": "item_reference", "id": first["output"][0]["id"]}
        assert other.post(RESPONSES, json=body | {"input": [item]}).status_code in (400, 404)
        assert mine.post(RESPONSES, json=further).status_code == 200


def test_an_answer_is_replayed_for_its_client_alone(several: Served) -> None:
    """A drawn answer may have other tokens than its encoded text.

    The number of tokens would show that the answer was given.
    """
    with asker(several, "127.0.0.3") as mine, asker(several, "127.0.0.4") as other:
        drawn = said("Hello", temperature=2.0, seed=5, max_tokens=60, ignore_eos=True, min_p=0, top_p=1, top_k=0)
        answer = mine.post(CHAT, json=drawn).json()
        turns = [*drawn["messages"], answer["choices"][0]["message"], {"role": "user", "content": "And?"}]  # type: ignore[misc]
        counts = [
            client.post(CHAT, json=said() | {"messages": turns}).json()["usage"]["prompt_tokens"]
            for client in (mine, other)
        ]
        with asker(several, "127.0.0.5") as fresh:
            counts.append(fresh.post(CHAT, json=said() | {"messages": turns}).json()["usage"]["prompt_tokens"])
        assert counts[0] != counts[1]
        assert counts[1] == counts[2]
