"""Tools that are not functions: left out by type, refused if they are chosen; and their calls in a history."""

import logging
from typing import Any

import pytest
from pydantic import ValidationError

from master.api.answers.requests import ChatRequest, ToolOptions
from master.api.anthropic.form import MessagesForm
from master.api.failures import RequestError
from master.api.openai.chat_form import ChatForm
from master.api.openai.responses_form import ResponsesForm
from master.api.unsupported_tools import HEADER, UnsupportedToolReports
from master.generation.client import Client
from tests.support.recorded import recorded

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}
LOOK: dict[str, Any] = {"type": "function", "name": "look", "parameters": SCHEMA}
CHAT_LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
ANTHROPIC_LOOK: dict[str, Any] = {"name": "look", "input_schema": SCHEMA}

RESPONSES_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search", "search_context_size": "low"},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}},
    {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "linux"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "file_search", "vector_store_ids": ["a"]},
    {"type": "image_generation"},
    {"type": "mcp", "server_label": "a", "server_url": "https://a.example"},
    {"type": "namespace", "name": "mcp__a", "tools": [LOOK]},
    {"type": "tool_search"},
    {"type": "openrouter:web_search"},
]
ANTHROPIC_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "mcp_toolset", "mcp_server_name": "a"},
]
CUSTOM: dict[str, Any] = {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}


def response(**more: Any) -> ChatRequest:
    form = ResponsesForm.model_validate({"input": "Go", **more})
    return form.ask(form.messages({}), Client())


def chat(**more: Any) -> ChatRequest:
    return ChatForm.model_validate({"messages": [{"role": "user", "content": "Go"}], **more}).ask(Client())


def anthropic(**more: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Go"}], **more}
    return MessagesForm.model_validate(body).ask(Client())


@pytest.mark.parametrize(
    ("ask", "look", "other"),
    [
        *((response, LOOK, tool) for tool in RESPONSES_TOOLS),
        *((anthropic, ANTHROPIC_LOOK, tool) for tool in ANTHROPIC_TOOLS),
        (chat, CHAT_LOOK, CUSTOM),
        (chat, CHAT_LOOK, {"type": "web_search"}),
    ],
)
def test_a_tool_of_another_kind_is_left_out_and_the_rest_is_kept(ask: Any, look: Any, other: Any) -> None:
    for tools in ([other, look], [look, other, other]):
        use: ToolOptions = ask(tools=tools).use
        assert [tool["name"] for tool in use.tools] == ["look"]
        assert use.left_out == (other["type"],)
    assert ask(tools=[other]).use == ToolOptions(left_out=(other["type"],))
    assert ask(tools=[look]).use.left_out == ()


@pytest.mark.parametrize(
    ("ask", "look", "others", "choice", "said"),
    [
        (response, LOOK, RESPONSES_TOOLS, {"type": "web_search_preview"}, "web_search_preview"),
        (response, LOOK, RESPONSES_TOOLS, {"type": "custom", "name": "patch"}, "custom"),
        (response, LOOK, RESPONSES_TOOLS, {"type": "function", "name": "patch"}, "'patch', which is left out"),
        (response, LOOK, RESPONSES_TOOLS, {"type": "mcp", "server_label": "a"}, "mcp"),
        (response, LOOK, [], {"type": "allowed_tools", "mode": "auto", "tools": []}, "allowed_tools"),
        (chat, CHAT_LOOK, [CUSTOM], {"type": "custom", "custom": {"name": "patch"}}, "custom"),
        (chat, CHAT_LOOK, [CUSTOM], {"type": "function", "function": {"name": "patch"}}, "'patch', which is left out"),
        (anthropic, ANTHROPIC_LOOK, ANTHROPIC_TOOLS, {"type": "tool", "name": "bash"}, "'bash', which is left out"),
    ],
)
def test_the_choice_of_a_tool_that_is_left_out_is_refused(
    ask: Any, look: Any, others: Any, choice: Any, said: str
) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        ask(tools=[look, *others], tool_choice=choice)
    assert refused.value.field == "tool_choice"


@pytest.mark.parametrize(
    ("ask", "other", "choice"),
    [
        (response, {"type": "local_shell"}, "required"),
        (chat, CUSTOM, "required"),
        (anthropic, ANTHROPIC_TOOLS[0], {"type": "any"}),
    ],
)
def test_a_call_that_is_required_needs_a_function(ask: Any, other: Any, choice: Any) -> None:
    with pytest.raises(RequestError, match=f"tools of type {other['type']} are left out"):
        ask(tools=[other], tool_choice=choice)


@pytest.mark.parametrize("kind", ["", "a b", "x" * 65, "a\r\nSet-Cookie: b", "\u202e"])
def test_a_type_that_no_header_carries_is_refused(kind: str) -> None:
    with pytest.raises(ValidationError):
        ResponsesForm.model_validate({"input": "Go", "tools": [{"type": kind}]})


def test_the_log_has_each_type_once(caplog: pytest.LogCaptureFixture) -> None:
    notes = UnsupportedToolReports()
    with caplog.at_level(logging.WARNING, "tpi.serve"):
        for _ in range(3):
            use = ToolOptions(left_out=("local_shell", "web_search"))
            assert notes.headers(use) == {HEADER: "local_shell, web_search"}
        assert [record.args for record in caplog.records] == [("local_shell",), ("web_search",)]
        for number in range(1000):  # a client makes types up
            notes.headers(ToolOptions(left_out=(f"t{number}",)))
    assert len(caplog.records) <= 64
    assert notes.headers(ToolOptions()) == {}


def called(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_codexs_history_becomes_turns() -> None:
    form = ResponsesForm.model_validate(recorded("codex_later", "m"))
    turns = form.messages({})
    assert [turn["role"] for turn in turns] == [
        *("system", "user", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant", "tool"),
        *("assistant", "tool", "assistant", "tool", "assistant", "user"),
    ]
    assert turns[3] == {
        "role": "assistant",
        "content": "I run the tests first.",
        "tool_calls": [
            called("exec_command", {"cmd": "pytest -q", "yield_time_ms": 1000}, "call_A1"),
            called("exec_command", {"cmd": "git status"}, "call_A2"),
        ],
    }
    assert turns[5] == {"role": "tool", "tool_call_id": "call_A2", "content": "On branch main"}
    shell, patch, search = (turns[index]["tool_calls"][0] for index in (6, 8, 12))
    assert shell["function"]["name"] == "local_shell"
    assert shell["function"]["arguments"]["command"] == ["cat", "sum.py"]
    assert patch["function"]["name"] == "apply_patch"
    assert patch["function"]["arguments"]["input"].startswith("*** Begin Patch")
    assert "Success" in turns[9]["content"]
    assert turns[11]["content"] == "[input_image: this model reads text only]"
    assert search["function"] == {"name": "tool_search", "arguments": {"query": "docs"}}
    use = form.ask(turns, Client()).use
    assert [tool["name"] for tool in use.tools] == ["exec_command", "update_plan", "view_image"]
    assert use.left_out == ("custom", "image_generation", "local_shell", "namespace", "tool_search", "web_search")


def test_claude_codes_history_becomes_turns() -> None:
    ask = MessagesForm.model_validate(recorded("claude_code_later", "m")).ask(Client())
    assert [turn["role"] for turn in ask.messages] == [
        *("system", "user", "assistant", "tool", "tool", "user", "assistant", "user"),
    ]
    assert ask.messages[4]["content"] == "[image: this model reads text only]"
    assert ask.messages[6] == {"role": "assistant", "content": "It is fixed."}
    assert len(ask.use.tools) == 4


HISTORIES: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    ([{"type": "web_search_call", "id": "ws_1", "action": {"type": "search"}}], []),
    ([{"type": "mcp_list_tools", "id": "a", "server_label": "a", "tools": []}, {"type": "reasoning"}], []),
    (
        [
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": ""}]},
        ],
        [
            {"role": "assistant", "content": "", "tool_calls": [called("shell", {"commands": ["ls"]}, "c")]},
            {"role": "tool", "tool_call_id": "c", "content": '{"stdout": "a", "stderr": ""}'},
        ],
    ),
    (
        [{"type": "local_shell_call_output", "id": "c", "output": "a"}],
        [{"role": "tool", "tool_call_id": "c", "content": "a"}],
    ),
    (
        [{"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot", "image_url": "d"}}],
        [{"role": "tool", "tool_call_id": "c", "content": "[computer_screenshot: this model reads text only]"}],
    ),
    (
        [{"type": "apply_patch_call_output", "call_id": "c", "status": "completed"}],
        [{"role": "tool", "tool_call_id": "c", "content": "completed"}],
    ),
]


@pytest.mark.parametrize(("items", "turns"), HISTORIES)
def test_items_of_tools_of_other_kinds(items: Any, turns: Any) -> None:
    said = {"role": "user", "content": "Go"}
    form = ResponsesForm.model_validate({"input": [said, *items]})
    assert form.messages({}) == [said, *turns]


@pytest.mark.parametrize("kind", ["video", "compaction", "compaction_trigger", "function"])
def test_an_item_without_a_rule_is_refused(kind: str) -> None:
    form = ResponsesForm.model_validate({"input": [{"type": kind, "encrypted_content": "x"}]})
    with pytest.raises(RequestError, match=f"items of type '{kind}' are not supported"):
        form.messages({})


def test_a_call_of_a_custom_tool_in_a_chat() -> None:
    turn = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** {"}}],
    }
    asked = chat(messages=[{"role": "user", "content": "Go"}, turn])
    assert asked.messages[1]["tool_calls"] == [called("patch", {"input": "*** {"}, "c")]


def test_results_of_anthropics_tools_keep_their_text() -> None:
    content = [
        {"type": "search_result", "source": "a", "title": "A", "content": [{"type": "text", "text": "found"}]},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": content}
    ask = anthropic(messages=[{"role": "user", "content": [result]}])
    assert ask.messages[0]["content"] == "found\n[document: this model reads text only]"
