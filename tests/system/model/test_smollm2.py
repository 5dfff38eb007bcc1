"""The real model, real processes: SmolLM2-135M over master and workers equals transformers, token for token."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from master.generation.answer import AnswerLimits
from master.options import RunOptions
from master.session import Session
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.generating import answer_in
from tpi.pack.reader import Pack

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three prime numbers and say why they are prime.",
)
TOKENS = 20
NEAR_TIE = 1e-4
GREEDY = Sampling(temperature=0)


@dataclass(frozen=True)
class Expected:
    """The tokens that transformers generates, and the lead of the best logit at each step."""

    prompt: list[int]
    tokens: list[int]
    leads: list[float]


@pytest.fixture(scope="module")
def expected(gguf: Path, pack: Pack) -> list[Expected]:
    import torch
    from transformers import AutoModelForCausalLM

    from master.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(pack)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    return [_generate(model, tokenizer.encode_chat([{"role": "user", "content": text}])) for text in PROMPTS]


def _generate(model: object, prompt: list[int]) -> Expected:
    import torch

    with torch.no_grad():
        made = model.generate(  # type: ignore[attr-defined]
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    best = [np.sort(logits[0].float().numpy())[-2:] for logits in made.logits]
    return Expected(prompt, made.sequences[0, len(prompt) :].tolist(), [float(top - second) for second, top in best])


@pytest.mark.timeout(900)  # the reference alone takes minutes on a machine that is busy
@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_greedy_tokens_equal_those_of_transformers(
    nodes: int, gguf: Path, cache: Path, expected: list[Expected]
) -> None:
    placement = RunOptions(str(gguf), local=nodes - 1, dtype="f32", cache=cache)
    with Session(placement) as session:
        for wanted in expected if nodes == 1 else expected[:1]:
            made = answer_in(session, wanted.prompt, Sampler(GREEDY), AnswerLimits(TOKENS)).token_ids
            assert_same_or_tied(made, wanted)
        heads = [node.heads for node in session.figures.report()]
    assert heads[0][0] == 0
    assert heads[-1][1] == 9
    assert all(before[1] == after[0] for before, after in pairwise(heads))


def assert_same_or_tied(made: list[int], wanted: Expected) -> None:
    """Check that tokens are equal up to the first step with nearly tied best logits; later tokens may differ."""
    for made_token, token, lead in zip(made, wanted.tokens, wanted.leads, strict=True):
        if made_token != token:
            assert lead < NEAR_TIE, (made, wanted.tokens)
            return


def test_chat_template_is_the_models_own(pack: Pack) -> None:
    from master.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(pack)
    text = tokenizer.render([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_ids == {0, 2}  # <|endoftext|>, <|im_end|>
