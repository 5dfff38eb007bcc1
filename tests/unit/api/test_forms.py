"""Bodies with more entries than anybody needs are refused by their number, before anything is looked at."""

import time
from typing import Any

import pytest

from master.api.failures import RequestError
from master.api.openai.chat_form import ChatForm

MESSAGE = {"role": "user", "content": "Hello"}
_SECONDS = 0.1  # of processor time, as the acceptance of bad input says


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", [MESSAGE] * 130_000),
        ("tools", [{"type": "function", "function": {"name": "look"}}] * 40_000),
        ("logit_bias", {str(token): 1 for token in range(200_000)}),
    ],
)
def test_too_many_entries_are_counted_and_not_read(field: str, value: Any) -> None:
    begun = time.thread_time()
    with pytest.raises(RequestError, match=rf"{field}: it has {len(value)} entries; give at most \d+"):
        ChatForm.model_validate({"messages": [MESSAGE], field: value})
    assert time.thread_time() - begun < _SECONDS


def test_as_many_as_there_may_be_are_taken() -> None:
    assert len(ChatForm.model_validate({"messages": [MESSAGE] * 10_000}).messages) == 10_000
