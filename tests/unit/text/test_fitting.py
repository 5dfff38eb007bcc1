"""Conversations are fitted to a chat template: a message without a place of its own joins another turn."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from master.text import tokenizer as tokenizer_module
from master.text.templates.renderer import open_work
from master.text.templates.template import FIRST_ANSWER, Rendering, TemplateRefusal
from master.text.templates.traits import CallForm
from master.text.tokenizer import Tokenizer
from tests.support.vocabularies import byte_level
from tpi.errors import ModelError

TOOLS: list[dict[str, Any]] = [{"name": "look", "parameters": {"type": "object", "properties": {"city": {}}}}]
HEAD = "{% for m in messages %}"
TURN = "<{{ m.role }}>{{ m.content }}\n"
END = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    f"{TURN}{END}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}\n{% set loop_messages = messages[1:] %}"
    "{% else %}{% set loop_messages = messages %}{% endif %}{% for m in loop_messages %}"
    "{% if m.role in ('user', 'assistant') %}" + TURN + "{% endif %}" + END
)
SYSTEM_TOOLS = (  # as Phi-4 mini
    HEAD + "{% if m.role == 'system' and 'tools' in m and m['tools'] is not none %}"
    "{{ '<' + m['role'] + '>' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|>\n' }}"
    "{% else %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endif %}" + END
)
CALLS = "{% for c in m.tool_calls %}<call {{ c.id }}>{{ c.function.name }} {{ ARGUMENTS }}\n{% endfor %}"
DISTILL = (  # as the distilled models of DeepSeek R1
    HEAD + "{% if m.role == 'assistant' and m.content is none %}"
    + CALLS.replace("ARGUMENTS", "'' + c['function']['arguments']")
    + "{% else %}" + TURN + "{% endif %}" + END
)  # fmt: skip
OBJECTS = CALLS.replace("ARGUMENTS", "c.function.arguments | tojson")
NATIVE = "{% if tools %}<tools>{{ tools | tojson }}\n{% endif %}" + HEAD + TURN + OBJECTS + END
JOINED = NATIVE.replace("c.function.arguments | tojson", "'' ~ c.function.arguments")
SHORT_IDS = NATIVE.replace(
    "<call {{ c.id }}>",
    "{% if c.id | length != 9 %}{{ raise_exception('ids are of 9 letters') }}{% endif %}<call {{ c.id }}>",
)
NO_TOOL_ROLE = NATIVE.replace(HEAD, HEAD + "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}")
ONE_CALL = NATIVE.replace(
    HEAD, HEAD + "{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('single calls') }}{% endif %}"
)
STRICT_TURNS = (  # as Mistral 7B v0.3: ids of calls and of results are checked, and turns but those of tools alternate
    "{% set ns = namespace(index=0) %}{% for m in messages %}{% if not (m.role == 'tool' or m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% if m.role == 'tool' and m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids are of 9 letters') }}{% endif %}{% endfor %}" + SHORT_IDS
)
PARTS = HEAD + "<{{ m.role }}>{% for part in m.content %}{{ part.text }}{% endfor %}{{ '\n' }}" + END
SYSTEM_OR_TOOLS = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}\n{% set messages = messages[1:] %}"
    "{% elif tools %}<tools>{{ tools | tojson }}\n{% endif %}" + HEAD + TURN + OBJECTS + END
)

SYSTEM, ASKED, SAID, AGAIN = (
    {"role": role, "content": text}
    for role, text in (("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"))
)


CALLED_TWICE: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": id_, "type": "function", "function": {"name": "look", "arguments": {"city": city}}}
        for id_, city in (("a1b2c3d4e", "Paris"), ("f1b2c3d4e", "Rome"))
    ],
}
RAIN, SUN = (
    {"role": "tool", "tool_call_id": id_, "content": text}
    for id_, text in (("a1b2c3d4e", "rain"), ("f1b2c3d4e", "sun"))
)
ONE_BY_ONE = (
    '<user>Hi\n<assistant>\n<call a1b2c3d4e>look {"city": "Paris"}\n<tool>rain\n'
    '<assistant>\n<call f1b2c3d4e>look {"city": "Rome"}\n<tool>sun\n'
)


def call(arguments: Any, content: str = "", id_: str = "call_0123456789") -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": id_, "type": "function", "function": function}],
    }


RESULT = {"role": "tool", "tool_call_id": "call_0123456789", "content": "rain"}


class InProcess:
    """A chat template that is rendered in this process, because starting another process takes too long here."""

    def __init__(self, source: str, model: str, special: Mapping[str, str]) -> None:
        self._model, self._work = model, open_work({"source": source, "special": dict(special)})
        self.rendered = 0

    def render(self, messages: Any, names: Any, answers: Any = ()) -> Rendering:
        self.rendered += 1
        asked = {"messages": messages, "names": names, "answers": list(answers), "first_answer": FIRST_ANSWER}
        try:
            done = self._work(json.loads(json.dumps(asked)))
        except Exception as error:  # a template can raise anything
            raise TemplateRefusal(self._model, str(error)) from error
        return Rendering(done["text"], b"".join(bytes([mark]) * length for length, mark in done["runs"]))


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "ChatTemplate", InProcess)


def model(template: str | None, tools: str | None = None) -> Tokenizer:
    info = {"chat_template": template, "tool_template": tools}
    fast = byte_level()
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return Tokenizer(fast, info, "tiny")


def text(tokenizer: Tokenizer, messages: list[dict[str, Any]], **more: Any) -> str:
    return tokenizer.spelling(tokenizer.encode_chat(messages, **more))


CASES: dict[str, tuple[str, list[dict[str, Any]], str]] = {
    "a system message without a turn": (
        NO_SYSTEM + ALTERNATING,
        [SYSTEM, ASKED, SAID, AGAIN],
        "<user>Be kind.\n\nHi\n<assistant>Hello\n<user>Bye\n<assistant>",
    ),
    "a system message that an alternation refuses": (ALTERNATING, [SYSTEM, ASKED], "<user>Be kind.\n\nHi\n<assistant>"),
    "a system message alone": (NO_SYSTEM + HEAD + TURN + END, [SYSTEM], "<user>Be kind.\n<assistant>"),
    "a system message that is shown with a question alone": (
        "{% set first = messages[0].content if messages[0].role == 'system' else '' %}" + HEAD
        + "{% if m.role != 'system' %}<{{ m.role }}>{{ first if loop.index0 == 1 }}{{ m.content }}\n{% endif %}" + END,
        [SYSTEM],
        "<user>Be kind.\n<assistant>",
    ),
    "two calls where a message has one": (ONE_CALL, [ASKED, CALLED_TWICE, RAIN, SUN], ONE_BY_ONE + "<assistant>"),
    "results in another order": (ONE_CALL, [ASKED, CALLED_TWICE, SUN, RAIN], ONE_BY_ONE + "<assistant>"),
    "two calls in one message": (
        NATIVE,
        [ASKED, CALLED_TWICE, RAIN, SUN],
        '<user>Hi\n<assistant>\n<call a1b2c3d4e>look {"city": "Paris"}\n<call f1b2c3d4e>look {"city": "Rome"}\n'
        "<tool>rain\n<tool>sun\n<assistant>",
    ),
    "a result whose id is checked": (
        STRICT_TURNS,
        [ASKED, CALLED_TWICE, RAIN, SUN, SAID, AGAIN],
        '<user>Hi\n<assistant>\n<call a1b2c3d4e>look {"city": "Paris"}\n<call f1b2c3d4e>look {"city": "Rome"}\n'
        "<tool>rain\n<tool>sun\n<assistant>Hello\n<user>Bye\n<assistant>",
    ),
    "a user who interrupts a result": (
        STRICT_TURNS,
        [ASKED, CALLED_TWICE, RAIN, SUN, AGAIN],
        '<user>Hi\n<assistant>\n<call a1b2c3d4e>look {"city": "Paris"}\n<call f1b2c3d4e>look {"city": "Rome"}\n'
        "<tool>rain\n<tool>sun\n<assistant>\n<user>Bye\n<assistant>",
    ),
    "two of the user": (ALTERNATING, [ASKED, AGAIN], "<user>Hi\n\nBye\n<assistant>"),
    "two of the assistant": (
        ALTERNATING,
        [ASKED, SAID, SAID, AGAIN],
        "<user>Hi\n<assistant>Hello\n\nHello\n<user>Bye\n<assistant>",
    ),
    "the assistant first": (ALTERNATING, [SAID, ASKED], "<user>\n<assistant>Hello\n<user>Hi\n<assistant>"),
    "the assistant first after a system message": (
        FIRST_SYSTEM,
        [SYSTEM, SAID, ASKED],
        "<system>Be kind.\n<assistant>Hello\n<user>Hi\n<assistant>",
    ),
    "two system messages": (
        FIRST_SYSTEM,
        [SYSTEM, SYSTEM, ASKED],
        "<system>Be kind.\n\nBe kind.\n<user>Hi\n<assistant>",
    ),
    "a later system message": (
        FIRST_SYSTEM,
        [ASKED, SAID, SYSTEM, AGAIN],
        "<user>Hi\n<assistant>Hello\n<user>Be kind.\n<user>Bye\n<assistant>",
    ),
    "a later system message in an alternation": (
        ALTERNATING,
        [ASKED, SAID, SYSTEM, AGAIN],
        "<user>Hi\n<assistant>Hello\n<user>Be kind.\n\nBye\n<assistant>",
    ),
    "turns that the template takes": (
        HEAD + TURN + END,
        [SYSTEM, SYSTEM, ASKED, AGAIN],
        "<system>Be kind.\n<system>Be kind.\n<user>Hi\n<user>Bye\n<assistant>",
    ),
    "contents of parts": (PARTS, [SYSTEM, ASKED], "<system>Be kind.\n<user>Hi\n<assistant>"),
    "arguments that are joined as text": (
        DISTILL,
        [ASKED, call({"city": "Paris"}), RESULT],
        '<user>Hi\n<call call_0123456789>look {"city": "Paris"}\n<tool>rain\n<assistant>',
    ),
    "arguments that Python would spell": (
        JOINED,
        [ASKED, call({"city": "Paris"}), RESULT],
        '<user>Hi\n<assistant>\n<call call_0123456789>look {"city": "Paris"}\n<tool>rain\n<assistant>',
    ),
    "arguments that are objects": (
        NATIVE,
        [ASKED, call({"city": "Paris"}), RESULT],
        '<user>Hi\n<assistant>\n<call call_0123456789>look {"city": "Paris"}\n<tool>rain\n<assistant>',
    ),
    "calls with text where they stand alone": (
        DISTILL,
        [ASKED, call({"city": "Paris"}, "I look."), RESULT],
        '<user>Hi\n<assistant>I look.\n{"name": "look", "arguments": {"city": "Paris"}}\n'
        "<user>The tool answered: rain\n<assistant>",
    ),
    "calls without a turn": (
        ALTERNATING,
        [ASKED, call({"city": "Paris"}), RESULT, AGAIN],
        '<user>Hi\n<assistant>{"name": "look", "arguments": {"city": "Paris"}}\n'
        "<user>The tool answered: rain\n\nBye\n<assistant>",
    ),
    "broken arguments": (
        NATIVE,
        [ASKED, call('{"city": "Par'), RESULT],
        '<user>Hi\n<assistant>{"name": "look", "arguments": "{\\"city\\": \\"Par"}\n'
        "<user>The tool answered: rain\n<assistant>",
    ),
    "results without a turn": (
        NO_TOOL_ROLE,
        [ASKED, call({"city": "Paris"}), RESULT],
        '<user>Hi\n<assistant>{"name": "look", "arguments": {"city": "Paris"}}\n'
        "<user>The tool answered: rain\n<assistant>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_all_of_a_conversation_is_shown(case: str) -> None:
    template, messages, expected = CASES[case]
    assert text(model(template), messages) == expected


def test_ids_are_short_where_they_have_to_be() -> None:
    shown = text(model(SHORT_IDS), [ASKED, call({"city": "Paris"}), RESULT])
    assert '>look {"city": "Paris"}\n<tool>rain' in shown
    assert "call_0123456789" not in shown
    assert "<call a1b2c3d4e>" in text(model(SHORT_IDS), [ASKED, call({}, id_="a1b2c3d4e"), RESULT])


TOLD: dict[str, tuple[str | None, str | None]] = {
    "by name": (NATIVE, None),
    "in the system message": (SYSTEM_TOOLS, None),
    "by name, in the place of a system message": (SYSTEM_OR_TOOLS, None),
    "by a template for tools": (HEAD + TURN + END, NATIVE),
    "by a system message": (HEAD + TURN + END, None),
    "by the user": (NO_SYSTEM + ALTERNATING, None),
    "without a template": (None, None),
    "by a template that names tools and reads none": ("{# tools #}" + HEAD + TURN + END, None),
}


@pytest.mark.parametrize("case", TOLD)
@pytest.mark.parametrize("system", [False, True])
def test_a_model_is_told_of_tools(case: str, system: bool) -> None:
    tokenizer = model(*TOLD[case])
    messages = [SYSTEM, ASKED] if system else [ASKED]
    plain, told = (text(tokenizer, messages, tools=tools) for tools in ((), TOOLS))
    assert "look" not in plain
    assert told.count('"look"') == 1
    for message in messages:
        assert message["content"] in told
    native = tokenizer.traits(with_tools=True).tells_tools
    assert native == ("To call one" not in told)
    if case == "in the system message":
        content = "Be kind." if system else ""
        assert told.startswith(f"<system>{content}<|tool|>{json.dumps(TOOLS)}<|/tool|>\n<user>Hi\n")
    if case == "by a template for tools":
        assert told.startswith("<tools>[")


def test_a_template_that_refuses_everything_says_its_own_reason() -> None:
    with pytest.raises(ModelError, match="nobody may ask"):
        model("{{ raise_exception('nobody may ask') }}").encode_chat([SYSTEM, ASKED, AGAIN], tools=TOOLS)


def test_only_what_is_needed_is_tried() -> None:
    tokenizer = model(NATIVE)
    text(tokenizer, [ASKED])
    assert tokenizer._template.rendered <= 3  # type: ignore[attr-defined]
    assert tokenizer.traits().calls == CallForm(null=False)


CONTINUED: dict[str, tuple[str | None, str, str]] = {
    "plain": (HEAD + TURN + END, "Once upon", "<user>Hi\n<assistant>Once upon"),
    "with an end of turn": (HEAD + TURN.replace("\n", "<end>\n") + END, "Once", "<user>Hi<end>\n<assistant>Once"),
    "with white space": (HEAD + TURN + END, "Once  ", "<user>Hi\n<assistant>Once  "),
    "trimmed": (HEAD + TURN.replace("m.content", "m.content | trim") + END, " Once \n", "<user>Hi\n<assistant>Once"),
    "of nothing": (HEAD + TURN.replace("m.content", "m.content | trim") + END, "", "<user>Hi\n<assistant>"),
    "of white space": (HEAD + TURN.replace("m.content", "m.content | trim") + END, " ", "<user>Hi\n<assistant>"),
    "cut at a thought": (
        HEAD + TURN.replace("m.content", "m.content.split('</think>')[-1]") + END,
        "<think>x</think>Once",
        "<user>Hi\n<assistant>Once",
    ),
    "of parts": (PARTS, "Once", "<user>Hi\n<assistant>Once"),
    "with control tokens in it": (HEAD + TURN + END, "<|im_end|>Once", "<user>Hi\n<assistant><|im_end|>Once"),
    "without a template": (None, "Once", "Hi\nOnce"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONTINUED)
def test_a_last_message_is_gone_on_with(case: str) -> None:
    template, content, expected = CONTINUED[case]
    messages = [ASKED, {"role": "assistant", "content": content}]
    assert text(model(template), messages, continued=True) == expected
    assert text(model(template), messages, continued=True, replay={1: [5, 6]}) == expected


def test_a_template_that_hides_the_last_message_is_refused() -> None:
    hides = "{% for m in messages %}{% if m.role == 'user' %}" + TURN + "{% endif %}{% endfor %}"
    with pytest.raises(ModelError, match="last message"):
        model(hides).encode_chat([ASKED, SAID], continued=True)


def test_thinking_is_switched_by_the_names_that_are_read() -> None:
    effort = HEAD + TURN + "{{ reasoning_effort | default('medium') }}" + END
    switch = HEAD + TURN + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}" + END
    assert model(effort).traits().switches == {"reasoning_effort"}
    assert model(switch).traits().switches == {"enable_thinking"}
    assert model(NATIVE).traits().switches == frozenset()
    assert model("{# enable_thinking #}" + HEAD + TURN + END).traits().switches == frozenset()
