"""Attacks by a real client on a real server; a second client streams meanwhile, and must not notice."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.attack import Target, target, unnoticed
from tests.support.models import TinyModel
from tests.support.serving import said

CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


@pytest.fixture(scope="module")
def served(tiny_model: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with target(tmp_path_factory.mktemp("attacked"), tiny_model("llama").directory, "--alias", "tiny") as served:
        yield served


EDGES: list[dict[str, Any]] = [
    {"temperature": 5e-324}, {"temperature": 1e-310, "top_k": 0, "top_p": 1, "min_p": 0}, {"top_p": 5e-324},
    {"repeat_penalty": 1e-40}, {"repetition_penalty": 5e-324}, {"repeat_penalty": 0.01, "frequency_penalty": 2},
    {"temperature": 1e-300, "logit_bias": {"5": 100, "6": -100}, "logprobs": True, "top_logprobs": 20},
    {"temperature": 5e-324, "response_format": {"type": "json_object"}, "logit_bias": {"2": -100}},
]  # fmt: skip


def test_settings_at_the_edge_of_their_ranges(served: Target) -> None:
    def attack(target: Target) -> None:
        for edge in EDGES:
            for stream in (False, True):
                answer = target.post(CHAT, said(**{"temperature": 1.0, "stream": stream, **edge}))
                assert answer.status_code in (200, 400), answer.text
                assert "model" not in answer.text or answer.status_code == 200, "it is not the model's fault"
                assert '"error"' not in answer.text or not stream or answer.status_code == 400, answer.text

    unnoticed(served, attack)


GREEDY: dict[str, Any] = {"ignore_eos": True, "max_tokens": 4000}
STARVING: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "many long answers": [(CHAT, said(**{**GREEDY, "n": 16, "stream": True}))] * 4,
    "many full contexts": [(TEXT, {**GREEDY, "prompt": ["Hello you " * 60] * 16, "max_tokens": 100})] * 4,
    "many requests": [(TEXT, {**GREEDY, "prompt": "Hello", "stream": True})] * 400,
    "embeddings": [("/v1/embeddings", {"input": ["Hello you " * 60] * 200})] * 4,
    "counting": [("/v1/messages/count_tokens", {"model": "tiny", "messages": [
        {"role": "user", "content": "Hello you " * 1500}]})] * 300,
}  # fmt: skip


@pytest.mark.parametrize("kind", STARVING)
def test_one_client_does_not_starve_another(kind: str, served: Target) -> None:
    def attack(target: Target) -> None:
        with ThreadPoolExecutor(64) as pool:
            statuses = list(pool.map(lambda one: target.post(*one).status_code, STARVING[kind]))
        assert set(statuses) <= {200, 400, 429}, statuses

    unnoticed(served, attack)
