"""Bodies with too many entries are refused by their number, before any entry is checked."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from master.api.anthropic.form import AnthropicTurn
from master.api.failures import RequestError
from master.api.forms import FormPart
from master.api.openai.chat_form import ChatForm, ChatMessage, MessageCall
from master.api.openai.completions import CompletionForm
from master.api.openai.embeddings import EmbeddingForm
from master.api.openai.fields import StreamOptions
from master.api.openai.history import InputItem
from master.generation.client import Client
from tests.support.counting import calls

MESSAGE = {"role": "user", "content": "Hello"}
_MOST_CALLS = 1000  # far fewer than there are entries


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [MESSAGE] * 130_000),
        ("tools", [{"type": "function", "function": {"name": "look"}}] * 40_000),
        ("logit_bias", {str(token): 1 for token in range(200_000)}),
    ],
)
def test_too_many_entries_are_counted_and_not_read(field: str, value: Any) -> None:
    with calls() as made, pytest.raises(RequestError, match=rf"{field}: it has {len(value)} entries; give at most \d+"):
        ChatForm.model_validate({"messages": [MESSAGE], field: value})
    assert made.number < _MOST_CALLS


NULLS: dict[str, tuple[type[FormPart], dict[str, Any]]] = {
    "a call": (MessageCall, {"id": None, "type": None, "function": {"name": "f", "arguments": None}}),
    "options of a stream": (StreamOptions, {"include_usage": None}),
    "a completion": (CompletionForm, {"prompt": "x", "max_tokens": None, "stop": None, "whatever": None}),
    "an item": (InputItem, {"type": None, "role": "user", "content": "x"}),
}


@pytest.mark.parametrize("case", NULLS)
def test_null_is_the_same_as_no_field(case: str) -> None:
    form, body = NULLS[case]
    given = {name: value for name, value in body.items() if value is not None}
    if "function" in given:
        given["function"] = {"name": "f"}
    assert form.model_validate(body) == form.model_validate(given)


@pytest.mark.parametrize("type_", [{}, {"type": None}])
def test_a_call_without_a_type_is_of_a_function(type_: dict[str, Any]) -> None:
    call = {"id": "a", "function": {"name": "f"}, **type_}
    form = ChatForm.model_validate({"messages": [MESSAGE, {"role": "assistant", "tool_calls": [call]}]})
    assert isinstance((form.messages[1].tool_calls or [])[0], MessageCall)


def test_no_logprobs_may_have_no_best_tokens() -> None:
    asked = {"messages": [MESSAGE], "logprobs": False, "top_logprobs": 0}
    assert ChatForm.model_validate(asked).ask(Client()).options.logprobs is None


def test_as_many_as_there_may_be_are_taken() -> None:
    assert len(ChatForm.model_validate({"messages": [MESSAGE] * 10_000}).messages) == 10_000


@pytest.mark.parametrize("entry", ["a", 5, None, {}, []])
@pytest.mark.parametrize(
    ("form", "field", "more"),
    [
        (CompletionForm, "prompt", {}), (EmbeddingForm, "input", {}), (ChatMessage, "content", {"role": "user"}),
        (ChatMessage, "tool_calls", {"role": "assistant"}), (AnthropicTurn, "content", {"role": "user"}),
    ],
)  # fmt: skip
def test_a_list_is_read_up_to_its_first_wrong_entry(
    form: type[BaseModel], field: str, more: dict[str, Any], entry: Any
) -> None:
    """Reporting further errors would take as long as an answer."""
    with pytest.raises(ValidationError) as found:
        form.model_validate({field: [{"type": 5}, *[entry] * 20_000], **more})
    assert found.value.error_count() < 10
