"""Greedy tokens in f32 on 1, 2, 3 and 5 nodes against transformers on the same weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.models import smollm2
from master.generation.answer import AnswerLimits, answer
from master.options import RunOptions
from master.session import Session
from master.text.tokenizer import Tokenizer
from master.vocabulary.sampler import Sampler, Sampling
from tpi.config import default_cache
from tpi.pack.library.locate import open_model

NODES = (1, 2, 3, 5)
TOKENS = 64
NEAR_TIE = 1e-4
PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about a lighthouse in winter.",
    "Explain in simple words why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five things to pack for a week in the mountains.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "Translate into German: The cat sleeps under the old table.",
    "Who was Ada Lovelace, and what is she known for?",
    'Summarise: "The meeting was moved from Monday to Thursday because two members were ill."',
    "def quicksort(items):\n    # complete this function\n",
)
NOTES = f"""
SmolLM2-135M-Instruct dequantised to f32, {len(PROMPTS)} prompts through the chat template, {TOKENS} tokens each at
temperature 0 (fewer where the answer ends). If the two best logits of transformers differ by less than {NEAR_TIE:g},
either token is right, and the tokens after it are not compared.
"""


@dataclass(frozen=True)
class Expected:
    """Token ids that transformers generates, and by how much the best logit of each step exceeds the second."""

    prompt: list[int]
    tokens: list[int]
    leads: list[float]


@dataclass(frozen=True)
class Agreement:
    """Token counts from comparing two answers."""

    equal: int
    tied: bool = False  # they part at a near tie
    wrong: bool = False  # they part elsewhere


def bench(quick: bool) -> Result:
    """Compare the answers of each number of nodes with the answers of transformers, one row per number of nodes."""
    model = smollm2().path
    prompts, tokens = (PROMPTS[:2], 16) if quick else (PROMPTS, TOKENS)
    expected = list(generate(model, prompts, tokens))
    rows: list[Row] = [_row(model, nodes, expected) for nodes in NODES]
    wrong = sum(int(row["answers that differ"]) for row in rows)
    check = Check("answers that differ from transformers, other than at a near tie", wrong, 0, at_most=True)
    leads = [lead for answer in expected for lead in answer.leads]
    notes = f"{NOTES}The closest that two best logits came was {min(leads):.2g}.\n"
    return Result("Parity with transformers", notes, [Table("Tokens that are equal", rows)], [check], timed=False)


def generate(model: Path, prompts: tuple[str, ...], tokens: int) -> Iterator[Expected]:
    """Generate the answer to each prompt with the greedy search of transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.load(open_model(str(model), "f32", default_cache()))
    reference = AutoModelForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32).eval()
    for text in prompts:
        prompt = torch.tensor([tokenizer.encode_chat([{"role": "user", "content": text}])])
        with torch.inference_mode():
            made = reference.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        best = [np.sort(logits[0].numpy())[-2:] for logits in made.logits]
        ids = made.sequences[0, prompt.shape[1] :].tolist()
        yield Expected(prompt[0].tolist(), ids, [float(top - second) for second, top in best])


def compare(made: list[int], wanted: Expected) -> Agreement:
    """Count the equal tokens up to the first difference, and note whether a near tie explains the difference."""
    for step, (token, other) in enumerate(zip(made, wanted.tokens, strict=False)):
        if token != other:
            tied = wanted.leads[step] < NEAR_TIE
            return Agreement(step, tied, not tied)
    return Agreement(min(len(made), len(wanted.tokens)), wrong=len(made) != len(wanted.tokens))


def _row(model: Path, nodes: int, expected: list[Expected]) -> Row:
    with Session(RunOptions(str(model), local=nodes - 1, dtype="f32")) as session:
        found = [compare(_answer(session, wanted), wanted) for wanted in expected]
    return {
        "nodes": nodes,
        "prompts": len(expected),
        "tokens": sum(len(wanted.tokens) for wanted in expected),
        "equal": sum(agreement.equal for agreement in found),
        "near ties": sum(agreement.tied for agreement in found),
        "answers that differ": sum(agreement.wrong for agreement in found),
    }


def _answer(session: Session, wanted: Expected) -> list[int]:
    limits = AnswerLimits(len(wanted.tokens))
    with session.answering() as engine:
        return answer(engine, session.tokenizer, wanted.prompt, Sampler(Sampling(temperature=0)), limits).token_ids
