"""The reasoning effort: each API's field reaches the template, under the name that the template uses."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from master.api.answers.prepare import Preparer
from master.api.answers.requests import ChatRequest, GenerationOptions
from master.api.anthropic.form import CountForm
from master.api.failures import RequestError
from master.api.openai.chat_form import ChatForm
from master.api.openai.responses_form import ResponsesForm
from master.generation.client import Client
from master.text.tokenizer import Tokenizer
from tests.support.vocabularies import byte_level

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}"
NAMED = f"{TURNS} effort={{{{ reasoning_effort | default('medium') }}}}"
SWITCHED = f"{TURNS} thinks={{{{ enable_thinking | default(true) }}}}"
CLIENT = Client("somebody", b"")


@pytest.fixture(scope="module")
def preparers() -> Iterator[dict[str, Preparer]]:
    fast = byte_level()
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = {name: Tokenizer(fast, {"chat_template": source}) for name, source in TEMPLATES.items()}
    yield {name: Preparer(tokenizer, 500) for name, tokenizer in made.items()}
    for tokenizer in made.values():
        with closing(tokenizer):
            pass


TEMPLATES = {
    "named": NAMED,
    "switched": SWITCHED,
    "neither": TURNS,
    "set": f"{{% set tone = tone | default('dry') %}}{{% set said = tone %}}{TURNS}{{{{ said }}}}",
    "thinks": f"{TURNS}<think>",
}


def chat(**more: Any) -> ChatRequest:
    return ChatForm.model_validate({"messages": [USER], **more}).ask(CLIENT)


def response(effort: str) -> ChatRequest:
    form = ResponsesForm.model_validate({"input": [USER], "reasoning": {"effort": effort, "summary": "auto"}})
    return form.ask(form.messages({}), CLIENT)


def claude(**more: Any) -> ChatRequest:
    return CountForm.model_validate({"model": "m", "messages": [USER], **more}).asked(GenerationOptions(), CLIENT)


EFFORTS: list[tuple[ChatRequest, str, str]] = [
    (chat(), "medium", "True"),
    (chat(reasoning_effort="high"), "high", "True"),
    (chat(reasoning_effort="none"), "none", "False"),
    (response("low"), "low", "True"),
    (response("none"), "none", "False"),
    (claude(output_config={"effort": "high"}), "high", "True"),
    (claude(thinking={"type": "disabled"}), "medium", "False"),
    (claude(thinking={"type": "enabled", "budget_tokens": 1024}), "medium", "True"),
    (claude(thinking={"type": "adaptive"}, output_config={"effort": "low"}), "low", "True"),
]


@pytest.mark.parametrize("case", range(len(EFFORTS)))
def test_an_effort_reaches_the_template(case: int, preparers: dict[str, Preparer]) -> None:
    ask, named, switched = EFFORTS[case]
    shown = {
        name: preparer._tokenizer.spelling(preparer.encode(ask))
        for name, preparer in preparers.items()
        if name in ("named", "switched")
    }
    assert shown == {"named": f"Hi effort={named}", "switched": f"Hi thinks={switched}"}


def test_where_no_template_reads_it_a_client_is_told(preparers: dict[str, Preparer]) -> None:
    preparer = preparers["neither"]
    with pytest.raises(
        RequestError, match=r"^reasoning_effort: this model cannot be told how much to think"
    ) as refused:
        preparer.encode(chat(reasoning_effort="high"))
    assert refused.value.field == "reasoning_effort"
    assert preparer.encode(chat(reasoning_effort="none"))
    assert preparer.encode(response("high"))
    assert preparer.effort(response("high")) is None
    assert preparers["named"].effort(response("high")) == "high"


def test_a_name_for_the_template_goes_before_the_field(preparers: dict[str, Preparer]) -> None:
    preparer = preparers["named"]
    ask = chat(reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"})
    assert preparer._tokenizer.spelling(preparer.encode(ask)) == "Hi effort=low"


UNREAD: list[tuple[str, dict[str, Any], str | None]] = [
    ("neither", {"enable_thinking": False}, None),
    ("neither", {"thinking": False, "reasoning_effort": "none"}, None),
    ("neither", {"enable_thinking": True}, "enable_thinking"),
    ("neither", {"enable_thinking": False, "tone": "calm"}, "tone"),
    ("neither", {"reasoning_effort": "low"}, "reasoning_effort"),
    ("named", {"reasoning_effort": "low"}, None),
    ("named", {"m": 1}, "m"),
    ("switched", {"enable_thinking": True}, None),
    ("set", {"tone": "calm"}, None),
    ("set", {"said": "calm"}, "said"),
    ("thinks", {"enable_thinking": True}, None),
    ("thinks", {"enable_thinking": False}, "enable_thinking"),
]


@pytest.mark.parametrize("case", range(len(UNREAD)))
def test_a_name_that_the_template_does_not_read_is_refused(case: int, preparers: dict[str, Preparer]) -> None:
    template, names, refused = UNREAD[case]
    ask = chat(chat_template_kwargs=names)
    if refused is None:
        assert preparers[template].encode(ask)
        return
    with pytest.raises(RequestError, match="does not read this name") as raised:
        preparers[template].encode(ask)
    assert raised.value.field == f"chat_template_kwargs.{refused}"
