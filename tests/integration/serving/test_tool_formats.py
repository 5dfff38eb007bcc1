"""OpenAI's client gets the same calls and reasoning in every format. The model's answers are scripted."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import validate
from tokenizers import Tokenizer as FastTokenizer

from master.api.answers.constraint import Grammars
from master.api.answers.prepare import Preparer
from master.generation.thread import Ticket
from master.text.tokenizer import Tokenizer
from master.vocabulary.sampler import Sampler, Sampling
from tests.support import models
from tests.support.call_examples import CALLS, EXAMPLES, TOOLS
from tests.support.call_templates import CONTROLS, TEMPLATES
from tests.support.serving import MODEL, Served, tiny_server
from tpi.pack.reader import Pack

if TYPE_CHECKING:
    from openai import OpenAI  # takes long to import, and every process of the tests collects this file

ASK: list[Any] = [{"role": "user", "content": "Go"}]
OFFERED: list[Any] = [{"type": "function", "function": tool} for tool in TOOLS]
ENDING = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CONTEXT = 1536


class Scripted(Sampler):
    """A sampler that draws given tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(Sampling(temperature=0))
        self._tokens = iter(tokens)

    def sample(self, logits: Any, history: Sequence[int] = (), prompt: int = 0) -> int:
        return next(self._tokens)


class Stage:
    """A server whose model has a given template and writes the answers that a test sets."""

    def __init__(self, served: Served, fast: FastTokenizer, ai: "OpenAI", monkeypatch: pytest.MonkeyPatch) -> None:
        self.ai, self.prompts = ai, list[str]()
        self._fast, self._service, self._monkeypatch = fast, served.service, monkeypatch
        self._answers: list[str] = []
        submit = served.thread.submit

        def scripted(ticket: Ticket) -> None:
            self.prompts.append(self._tokenizer.spelling(ticket.asked.tokens))
            if self._answers:
                tokens = [*self._tokenizer.encode(self._answers.pop(0), special=False), *self._tokenizer.eos_ids]
                ticket.asked = replace(ticket.asked, sampler=Scripted(tokens))
            submit(ticket)

        monkeypatch.setattr(served.thread, "submit", scripted)

    def play(self, template: str, *answers: str) -> None:
        """Give the model a template and the scripted `answers`, one after another; later answers are random."""
        end = self._fast.token_to_id(models.SPECIAL[-1])
        self._tokenizer = Tokenizer(self._fast, {"chat_template": template, "eos_ids": [end]})
        self._answers = list(answers)
        parts = {
            "tokenizer": self._tokenizer,
            "preparer": Preparer(self._tokenizer, CONTEXT),
            "grammars": Grammars(self._tokenizer, models.VOCAB),
        }
        for name, part in parts.items():
            self._monkeypatch.setattr(self._service, f"_{name}", part)

    def close(self) -> None:
        """Stop the process that renders the template."""
        self._tokenizer.close()

    def ask(self, messages: Sequence[Any] = ASK, **more: Any) -> Any:
        more = {"max_tokens": 700, **more}
        return self.ai.chat.completions.create(model=MODEL, messages=messages, **more)

    def stream(self, **more: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
        """Return the text, the reasoning, the calls, and the finish reason that the deltas add up to."""
        said = thought = reason = ""
        calls: dict[int, list[str]] = {}
        for chunk in self.ask(stream=True, **more):
            for choice in chunk.choices:
                said += choice.delta.content or ""
                thought += (choice.delta.model_extra or {}).get("reasoning_content") or ""
                reason = choice.finish_reason or reason
                for call in choice.delta.tool_calls or ():
                    parts = calls.setdefault(call.index, ["", ""])
                    parts[0] += call.function.name or ""
                    parts[1] += call.function.arguments or ""
        return said, thought, [(name, json.loads(given)) for name, given in calls.values()], reason


@pytest.fixture(scope="module")
def served(tiny_pack: Callable[..., Pack], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tiny_server(tiny_pack("llama"), tmp_path_factory.mktemp("served"), key=None, context=CONTEXT) as served:
        yield served


@pytest.fixture
def stage(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    from openai import OpenAI

    with monkeypatch.context() as patch:
        patch.setattr(models, "SPECIAL", (*CONTROLS, "<seed:think>", "</seed:think>", *models.SPECIAL))
        models.write_tokenizer(tmp_path)
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as ai:
        stage = Stage(served, fast, ai, monkeypatch)
        yield stage
        stage.close()


@pytest.mark.parametrize("name", EXAMPLES)
def test_published_calls_whole_streamed_and_answered(name: str, stage: Stage) -> None:
    answer = f"I look.\n{EXAMPLES[name]}"
    stage.play(TEMPLATES[name] + "{{ tools | tojson if tools }}" + ENDING, answer, answer, "It rains.")
    choice = stage.ask(tools=OFFERED).choices[0]
    calls = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == CALLS
    assert stage.stream(tools=OFFERED) == ("I look.", "", CALLS, "tool_calls")
    results = [{"role": "tool", "tool_call_id": call.id, "content": f"rain {call.id}"} for call in calls]
    last = stage.ask([*ASK, choice.message.model_dump(exclude_none=True), *results], tools=OFFERED)
    assert last.choices[0].message.content == "It rains."
    assert answer in stage.prompts[-1]
    assert all(f"<|tool|>rain {call.id}<|end|>" in stage.prompts[-1] for call in calls)


@pytest.mark.parametrize("name", TEMPLATES)
def test_forced_calls_follow_the_schema(name: str, stage: Stage) -> None:
    """The answers are not scripted: the model is random, and the grammar allows only a call."""
    schema = {
        "type": "object",
        "properties": {"age": {"$ref": "#/$defs/age"}, "kind": {"type": "string", "enum": ["a", "b c"]}},
        "required": ["age", "kind"],
        "additionalProperties": False,
        "$defs": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
    }
    tools = [{"type": "function", "function": {"name": one, "parameters": schema}} for one in ("look_up", "look")]
    stage.play(TEMPLATES[name] + "{{ tools | tojson if tools }}" + ENDING)
    named = {"type": "function", "function": {"name": "look"}}
    for choice, names in (("required", {"look", "look_up"}), (named, {"look"})):
        _, _, calls, reason = stage.stream(
            tools=tools, tool_choice=choice, parallel_tool_calls=False, temperature=0, max_tokens=250
        )
        assert (len(calls), reason) == (1, "tool_calls")
        assert calls[0][0] in names
        validate(calls[0][1], schema)


REASONING = {
    "Qwen3.5": "{{ '<think>' }}{{ m.reasoning_content }}</think>",
    "only its end": "{{ m.content.split('</think>')[-1] }}",
    "Gemma 4": "{{ '<|channel>thought\n' }}{{ m.reasoning_content }}<channel|>",
    "Seed": "<seed:think>{{ m.reasoning_content }}</seed:think>",
    "Command": "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>",
    "Mistral": "[THINK]{{ m.reasoning_content }}[/THINK]",
    "thought": "<thought>{{ m.reasoning_content }}</thought>",
    "made up": "<muse:a>{{ m.reasoning_content }}</muse:a>",
}
TAGS = {
    "only its end": ("<think>\n", "</think>"), "Qwen3.5": ("<think>\n", "</think>"),
    "Gemma 4": ("<|channel>thought\n", "<channel|>"), "Seed": ("<seed:think>", "</seed:think>"),
    "Command": ("<|START_THINKING|>", "<|END_THINKING|>"), "Mistral": ("[THINK]", "[/THINK]"),
    "thought": ("<thought>", "</thought>"), "made up": ("<muse:a>", "</muse:a>"),
}  # fmt: skip


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("name", REASONING)
def test_reasoning_is_separated_whole_and_streamed(name: str, begun: bool, stage: Stage) -> None:
    shown = "{% if m.role == 'assistant' and m.reasoning_content is defined %}" + REASONING[name] + "{% endif %}"
    opening, closing = TAGS[name]
    template = TEMPLATES["Hermes"].replace("{{ m.content or '' }}", f"{shown}{{{{ m.content or '' }}}}")
    template += "{{ tools | tojson if tools }}" + ENDING.replace("<|assistant|>", f"<|assistant|>{opening * begun}")
    answer = f"{opening * (not begun)}Hm, < 5.\nYes.\n{closing}\n\nI look.\n{EXAMPLES['Hermes']}"
    stage.play(template, answer, answer)
    message = stage.ask(tools=OFFERED).choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("I look.", "Hm, < 5.\nYes.")
    assert len(message.tool_calls) == 2
    assert stage.stream(tools=OFFERED) == ("I look.", "Hm, < 5.\nYes.", CALLS, "tool_calls")
