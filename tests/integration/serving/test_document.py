"""schemathesis with the server's OpenAPI document: neither valid requests nor many invalid ones cause a 5xx."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from master.api.state import ServeLimits
from tests.support.serving import KEY, client, tiny_server
from tpi.pack.reader import Pack

EXAMPLES = 12  # of each operation and kind; nightly runs take more
QUICK = ServeLimits(answer_s=20.0)


@pytest.mark.timeout(300)
def test_nothing_that_is_sent_makes_the_server_fail(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    import schemathesis  # takes long, and every process of the tests collects this file
    from schemathesis import GenerationMode

    with tiny_server(tiny_pack("llama"), tmp_path, QUICK, context=64) as served, client(served) as http:
        document = http.get("/openapi.json").json()
        paths = set(document["paths"])
        assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages"} <= paths
        schema = schemathesis.openapi.from_dict(document)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            for found in schema.get_all_operations():
                operation: Any = found
                _try(operation.ok(), mode, served.url)


def _try(operation: Any, mode: Any, url: str) -> None:
    cases: st.SearchStrategy[Any] = operation.as_strategy(generation_mode=mode)
    seen: list[int] = []

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(cases)
    def one(case: Any) -> None:
        answer = case.call(base_url=url, headers={"x-api-key": KEY}, timeout=60)
        seen.append(answer.status_code)
        assert answer.status_code < 500 or answer.status_code == 503, (answer.status_code, answer.text)

    with suppress(*([Unsatisfiable] if mode.is_negative else [])):  # a path without parameters
        one()
        assert seen
