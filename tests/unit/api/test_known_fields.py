"""Every field of a request is used, or harmless and documented, or refused by name.

The fields are those of the types of the public clients, so a new field of a client makes a test fail.
"""

import ast
import re
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import ValidationError

from master.api.anthropic import form as messages_form
from master.api.failures import RequestError
from master.api.forms import FormPart, refuse
from master.api.openai import chat_form, completions, embeddings, fields, responses_form
from master.api.unused import NEUTRAL
from tests.support.paths import ROOT

USER: dict[str, Any] = {"role": "user", "content": "x"}
CHAT = {"messages": [USER]}
CLAUDE = {"model": "m", "max_tokens": 5, "messages": [USER]}
FUNCTION = {"type": "function", "function": {"name": "f"}}

# each with a valid body, and the names of the clients' types that have its fields: the clients take seconds to import
FORMS: dict[str, tuple[type[FormPart], dict[str, Any], tuple[str, ...]]] = {
    "chat": (chat_form.ChatForm, CHAT, ("openai.types.chat.completion_create_params:CompletionCreateParamsBase",)),
    "completions": (
        completions.CompletionForm,
        {"prompt": "x"},
        ("openai.types.completion_create_params:CompletionCreateParamsBase",),
    ),
    "embeddings": (
        embeddings.EmbeddingForm,
        {"input": "x"},
        ("openai.types.embedding_create_params:EmbeddingCreateParams",),
    ),
    "responses": (
        responses_form.ResponsesForm,
        {"input": "x"},
        ("openai.types.responses.response_create_params:ResponseCreateParamsBase",),
    ),
    "messages": (
        messages_form.MessagesForm,
        CLAUDE,
        (
            "anthropic.types.message_create_params:MessageCreateParamsBase",
            "anthropic.types.beta.message_create_params:MessageCreateParamsBase",
        ),
    ),
    "count_tokens": (
        messages_form.CountForm,
        {"model": "m", "messages": [USER]},
        ("anthropic.types.message_count_tokens_params:MessageCountTokensParams",),
    ),
}

# how each nested part is reached, and whose fields it has
PARTS: dict[str, tuple[type[FormPart], dict[str, Any], str, str]] = {
    "a user's message": (chat_form.ChatForm, CHAT, "messages.0", "openai.types.chat:ChatCompletionUserMessageParam"),
    "an assistant's message": (
        chat_form.ChatForm,
        {"messages": [{"role": "assistant", "content": "x"}]},
        "messages.0",
        "openai.types.chat:ChatCompletionAssistantMessageParam",
    ),
    "a tool's message": (
        chat_form.ChatForm,
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]},
        "messages.0",
        "openai.types.chat:ChatCompletionToolMessageParam",
    ),
    "a text": (
        chat_form.ChatForm,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        "messages.0.content.0",
        "openai.types.chat:ChatCompletionContentPartTextParam",
    ),
    "a call": (
        chat_form.ChatForm,
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", **FUNCTION}]}]},
        "messages.0.tool_calls.0",
        "openai.types.chat:ChatCompletionMessageFunctionToolCallParam",
    ),
    "a tool": (
        chat_form.ChatForm,
        CHAT | {"tools": [FUNCTION]},
        "tools.0",
        "openai.types.chat:ChatCompletionFunctionToolParam",
    ),
    "a choice": (
        chat_form.ChatForm,
        CHAT | {"tools": [FUNCTION], "tool_choice": FUNCTION},
        "tool_choice",
        "openai.types.chat:ChatCompletionNamedToolChoiceParam",
    ),
    "options of a stream": (
        chat_form.ChatForm,
        CHAT | {"stream_options": {}},
        "stream_options",
        "openai.types.chat:ChatCompletionStreamOptionsParam",
    ),
    "an item": (
        responses_form.ResponsesForm,
        {"input": [USER]},
        "input.0",
        "openai.types.responses:EasyInputMessageParam",
    ),
    "a call that is an item": (
        responses_form.ResponsesForm,
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}]},
        "input.0",
        "openai.types.responses:ResponseFunctionToolCallParam",
    ),
    "an answer that is an item": (
        responses_form.ResponsesForm,
        {"input": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]}]},
        "input.0.content.0",
        "openai.types.responses:ResponseOutputTextParam",
    ),
    "a tool of a response": (
        responses_form.ResponsesForm,
        {"input": "x", "tools": [{"type": "function", "name": "f"}]},
        "tools.0",
        "openai.types.responses:FunctionToolParam",
    ),
    "the text of a response": (
        responses_form.ResponsesForm,
        {"input": "x", "text": {}},
        "text",
        "openai.types.responses:ResponseTextConfigParam",
    ),
    "a block of text": (
        messages_form.MessagesForm,
        CLAUDE | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        "messages.0.content.0",
        "anthropic.types:TextBlockParam",
    ),
    "a block of thought": (
        messages_form.MessagesForm,
        CLAUDE | {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}, USER]},
        "messages.0.content.0",
        "anthropic.types:ThinkingBlockParam",
    ),
    "a use": (
        messages_form.MessagesForm,
        CLAUDE | {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}, USER]},
        "messages.0.content.0",
        "anthropic.types:ToolUseBlockParam",
    ),
    "a result": (
        messages_form.MessagesForm,
        CLAUDE | {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
        "messages.0.content.0",
        "anthropic.types:ToolResultBlockParam",
    ),
    "a tool of a message": (
        messages_form.MessagesForm,
        CLAUDE | {"tools": [{"name": "f", "input_schema": {}}]},
        "tools.0",
        "anthropic.types:ToolParam",
    ),
    "what is thought of": (
        messages_form.MessagesForm,
        CLAUDE | {"thinking": {"type": "enabled"}},
        "thinking",
        "anthropic.types:ThinkingConfigEnabledParam",
    ),
    "how it is said": (
        messages_form.MessagesForm,
        CLAUDE | {"output_config": {}},
        "output_config",
        "anthropic.types:OutputConfigParam",
    ),
}

OF_OTHERS = sorted({
    *("n_predict", "cache_prompt", "typical_p", "mirostat", "grammar", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "structured_outputs", "json_schema", "min_tokens", "stop_token_ids", "echo", "bad_words"),
    *("prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    *("top_a", "tfs_z", "dry_multiplier", "xtc_probability", "dynatemp_range", "n_keep", "n_probs", "id_slot"),
    *("length_penalty", "early_stopping", "use_beam_search", "best_of", "truncate_prompt_tokens", "lora", "images"),
    *("allowed_token_ids", "documents", "chat_template", "mm_processor_kwargs", "priority", "options", "num_ctx"),
    *("num_predict", "think", "format", "transforms", "provider", "plugins", "models", "route", "samplers"),
    *("enable_thinking",),
})  # fmt: skip

STRANGE: dict[str, Any] = {"strange": [7]}  # no field takes it as it is


def error_of(form: type[FormPart], body: dict[str, Any]) -> RequestError | None:
    """Return the error for a body, as the application reports it."""
    try:
        form.model_validate(body)
    except ValidationError as error:
        return refuse(error.errors(), body)
    except RequestError as error:
        return error
    return None


def changed(body: Any, path: list[str], name: str, value: Any) -> Any:
    """Return the body with one more field at `path`."""
    if not path:
        return {**body, name: value}
    if isinstance(body, list):
        at = int(path[0])
        return [*body[:at], changed(body[at], path[1:], name, value), *body[at + 1 :]]
    return {**body, path[0]: changed(body[path[0]], path[1:], name, value)}


def all_parts(form: type[FormPart]) -> Iterator[type[FormPart]]:
    """Return a form and all forms inside it."""
    seen, stack = set[Any](), list[Any]([form])
    while stack:
        one: Any = stack.pop()
        if one in seen:
            continue
        seen.add(one)
        if isinstance(one, type) and issubclass(one, FormPart):
            yield one
            stack.extend(field.annotation for field in one.model_fields.values())
        stack += get_args(one)


@pytest.mark.parametrize("name", FORMS)
def test_fields_of_a_body_are_known_or_refused_by_name(name: str) -> None:
    form, body, params = FORMS[name]
    known = {field for one in params for field in get_type_hints(resolve_name(one))}
    assert error_of(form, body) is None
    for field in sorted(known | set(OF_OTHERS)):
        assert error_of(form, {**body, field: None}) is None or field in form.fields()
        error = error_of(form, {**body, field: STRANGE})
        if field in form.harmless:
            assert error is None
        else:
            assert error is not None, field
            assert error.field is not None
            assert error.field.startswith(field)
            assert str(error).startswith(error.field)


@pytest.mark.parametrize("name", PARTS)
def test_fields_of_a_part_are_known_or_refused_by_name(name: str) -> None:
    form, body, path, params = PARTS[name]
    assert error_of(form, body) is None
    where = re.sub(r"\.(\d+)", r"[\1]", path)
    for field in [*get_type_hints(resolve_name(params)), "unheard_of"]:
        error = error_of(form, changed(body, path.split("."), field, STRANGE))
        if error is None:
            assert any(field in part.harmless | part.fields() for part in all_parts(form)), field
        else:
            assert error.field is not None
            assert error.field.startswith(where), (field, str(error))


def test_only_values_without_an_effect_are_accepted() -> None:
    for name, values in NEUTRAL.items():
        for value in values:
            assert error_of(chat_form.ChatForm, CHAT | {name: value}) is None, (name, value)
        assert error_of(chat_form.ChatForm, CHAT | {name: "something"}) is not None
    said = str(error_of(chat_form.ChatForm, CHAT | {"functions": [{"name": "f"}]}))
    assert said == "functions: this field, or this value of it, is not supported; send tools"
    for name in ("suffix", "best_of"):
        assert error_of(completions.CompletionForm, {"prompt": "x", name: 5}) is not None
    for name, value in (("background", True), ("truncation", "auto"), ("conversation", "c")):
        assert error_of(responses_form.ResponsesForm, {"input": "x", name: value}) is not None


FILES = sorted((ROOT / "master" / "api").rglob("*.py"))


def test_fields_that_are_declared_are_read() -> None:
    """A declared field that no line of the server uses would be accepted and ignored."""
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "one_of"]
    read |= {str(arg.value) for call in calls for arg in call.args if isinstance(arg, ast.Constant)}
    kinds = {"type", "role"}
    for form, _, _ in FORMS.values():
        for part in all_parts(form):
            dumped = part in (chat_form.ToolFunction, responses_form.ResponsesTool)  # handed on as a whole
            assert dumped or set(part.model_fields) - kinds <= read, (part, set(part.model_fields) - read)


def test_harmless_fields_are_documented() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    for form, _, _ in FORMS.values():
        missing = {name for name in form.harmless if f"`{name}`" not in text}
        assert not missing
    assert fields.CommonFields.harmless
