"""The form of an answer: the grammar of a complete output, and the parser that reads it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from master.api.answers import grammars
from master.api.answers.requests import ChatRequest, GenerationOptions, ToolOptions
from master.api.tools.either import CallsOrTextParser
from master.api.tools.families import SPELLED, ToolFamily, family_of, reasoning_tags
from master.api.tools.harmony import HarmonyParser
from master.api.tools.parser import NoTools, ToolParser
from master.api.tools.reasoning import ReasoningParser
from master.text.channels import has_channels, has_recipients
from master.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerFormat:
    """The form that an answer must have, and how to parse it.

    Attributes:
        parser: function that creates the parser of one answer.
        grammar: the grammar of the complete output as text; None if any output is allowed.
        field: the request field that the grammar comes from.
        one_call: whether the answer ends after one call.
        parts: name and grammar of each part, such as a tool; an error names the part that cannot be compiled.
    """

    parser: Callable[[], ToolParser] = NoTools
    grammar: str | None = None
    field: str = ""
    one_call: bool = False
    parts: tuple[tuple[str, str], ...] = ()


class AnswerFormats:
    """Chooses the form of each answer of one model, from its chat template and the request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.channels = has_channels(tokenizer.chat_template)
        self._recipients = has_recipients(tokenizer.chat_template)
        self._literal = grammars.literal_of(tokenizer.control)

    @cached_property
    def thinking(self) -> tuple[str, str] | None:
        """The tags around the model's reasoning; None if it has none."""
        known = reasoning_tags(self._tokenizer.chat_template)
        return known if known or self.channels else self._tokenizer.traits().reasoning_tags

    @cached_property
    def family(self) -> ToolFamily:
        """The syntax of the model's tool calls, from its chat template; bare JSON if the template shows none."""
        traits = self._tokenizer.traits(with_tools=True)
        if not traits.tells_tools:
            return family_of(None)
        return family_of(self._tokenizer.tool_template, None if self.channels else traits.call_marks)

    def spelled(self, with_tools: bool) -> frozenset[int]:
        """Return the control tokens that parsers read as text: reasoning tags and, if `with_tools`, the marks of
        tool calls.
        """
        found = self._spelled
        if with_tools:
            found |= self._tokenizer.controls_in(self.family.marks.whole) - self._tokenizer.eos_ids
        return found

    @cached_property
    def _spelled(self) -> frozenset[int]:
        return self._tokenizer.controls_in("\n".join((*SPELLED, *(self.thinking or ()))))

    @property
    def any_object(self) -> frozenset[str]:
        """The grammars for answers that are any JSON object, one for each way in which the model may begin."""
        answer = grammars.of_schema(grammars.ANY_OBJECT)
        ways = ((None, False), (self.thinking, False), (self.thinking, True))
        return frozenset(grammars.whole(answer, thinking, begun, self._literal) for thinking, begun in ways)

    def for_text(self, wanted: GenerationOptions) -> AnswerFormat:
        """Return the form of an answer that continues a text."""
        if wanted.grammar is None:
            return AnswerFormat()
        grammar = grammars.whole(wanted.grammar, None, False, self._literal)
        return AnswerFormat(NoTools, grammar, wanted.grammar_field)

    def for_chat(self, ask: ChatRequest, begun: bool) -> AnswerFormat:
        """Return the form of an answer to a conversation.

        `begun` is True if the prompt ends inside the model's reasoning.
        """
        answer, field = self._grammar(ask)
        grammar = None if answer is None else grammars.whole(answer, self.thinking, begun, self._literal)

        def parser() -> ToolParser:
            inner = self._reader(ask)
            if self.channels or self._recipients:
                return HarmonyParser(inner)
            return ReasoningParser(self.thinking, begun, inner) if self.thinking else inner

        parts = _parts(ask.use) if grammar is not None else ()
        return AnswerFormat(parser, grammar, field, bool(ask.use.tools) and not ask.use.several, parts)

    def _grammar(self, ask: ChatRequest) -> tuple[str | None, str]:
        use, wanted = ask.use, ask.options
        tools = [dict(tool) for tool in use.tools if use.only in (None, tool["name"])]
        if use.forced:
            return grammars.of_calls(self.family, tools, use.several, self._literal), "tools"
        if wanted.grammar is not None and use.tools:
            calls = grammars.of_calls(self.family, tools, use.several, self._literal)
            return grammars.either(calls, wanted.grammar), wanted.grammar_field
        if use.strict and self.channels:
            return grammars.of_channels(_strict(use), self._literal), "tools"
        if use.strict:
            return grammars.of_text_and_calls(self.family, _strict(use), use.several, self._literal), "tools"
        return wanted.grammar, wanted.grammar_field

    def _reader(self, ask: ChatRequest) -> ToolParser:
        names = [tool["name"] for tool in ask.use.tools]
        calls = self.family.parser(ask.use.tools) if names else NoTools()
        if names and ask.options.grammar is not None and not ask.use.forced:
            return CallsOrTextParser(self.family.beginnings(names), calls)
        return calls


def _parts(use: ToolOptions) -> tuple[tuple[str, str], ...]:
    return tuple((f"the tool {tool['name']}", grammars.of_schema(grammars.arguments_of(tool))) for tool in use.tools)


def _strict(use: ToolOptions) -> list[dict[str, Any]]:
    """Return each tool's name and parameters for a grammar; tools that are not strict may take any object."""
    return [dict(tool) if tool["name"] in use.strict else {"name": tool["name"]} for tool in use.tools]
