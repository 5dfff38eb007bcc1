"""What an answer may be, and who reads it: the grammar of a whole output and its parser belong together."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from master.api.answers import grammars
from master.api.answers.ask import ChatAsk, ToolUse, Wanted
from master.api.tools.either import EitherParser
from master.api.tools.families import ToolFamily, family_of, reasoning_tags
from master.api.tools.harmony import HarmonyParser
from master.api.tools.parser import NoTools, ToolParser
from master.api.tools.reasoning import ReasoningParser
from master.text.channels import has_channels
from master.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Shape:
    """The form of an answer.

    Attributes:
        parser: makes a new reader, for each of several answers.
        grammar: of the whole output, not compiled yet; None: anything may come.
        field: where the client asked for the grammar.
        one_call: the answer is over after one call.
        parts: what each of several things in the grammar is called, with its own grammar: to say which is at fault.
    """

    parser: Callable[[], ToolParser] = NoTools
    grammar: str | None = None
    field: str = ""
    one_call: bool = False
    parts: tuple[tuple[str, str], ...] = ()


class Shapes:
    """The forms of one model's answers, by its chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        template = tokenizer.chat_template
        self.thinking = reasoning_tags(template)
        self._tokenizer = tokenizer
        self.channels = has_channels(template)
        self._literal = grammars.literal_of(tokenizer.control)

    @cached_property
    def family(self) -> ToolFamily:
        """How the model writes calls: as its template shows, or else as it is told."""
        told = self._tokenizer.traits(with_tools=True).tells_tools
        return family_of(self._tokenizer.tool_template if told else None)

    @property
    def of_objects(self) -> frozenset[str]:
        """The grammars of answers that are any JSON object."""
        answer = grammars.of_schema(grammars.ANY_OBJECT)
        ways = ((None, False), (self.thinking, False), (self.thinking, True))
        return frozenset(grammars.whole(answer, thinking, begun, self._literal) for thinking, begun in ways)

    def of_text(self, wanted: Wanted) -> Shape:
        """An answer to a text that is gone on with as it is."""
        if wanted.grammar is None:
            return Shape()
        grammar = grammars.whole(wanted.grammar, None, False, self._literal)
        return Shape(NoTools, grammar, wanted.grammar_field)

    def of_chat(self, ask: ChatAsk, begun: bool) -> Shape:
        """An answer to a conversation; `begun`: its prompt ends with the opening of a thought."""
        answer, field = self._grammar(ask)
        grammar = None if answer is None else grammars.whole(answer, self.thinking, begun, self._literal)

        def parser() -> ToolParser:
            inner = self._reader(ask)
            if self.channels:
                return HarmonyParser(inner)
            return ReasoningParser(self.thinking, begun, inner) if self.thinking else inner

        parts = _parts(ask.use) if grammar is not None else ()
        return Shape(parser, grammar, field, bool(ask.use.tools) and not ask.use.several, parts)

    def _grammar(self, ask: ChatAsk) -> tuple[str | None, str]:
        """The grammar of what comes after any thought, and where the client asked for it."""
        use, wanted = ask.use, ask.wanted
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

    def _reader(self, ask: ChatAsk) -> ToolParser:
        names = [tool["name"] for tool in ask.use.tools]
        calls = self.family.parser(names) if names else NoTools()
        if names and ask.wanted.grammar is not None and not ask.use.forced:
            return EitherParser(self.family.beginnings(names), calls)
        return calls


def _parts(use: ToolUse) -> tuple[tuple[str, str], ...]:
    """Return the grammar of each tool's arguments alone."""
    return tuple((f"the tool {tool['name']}", grammars.of_schema(grammars.arguments_of(tool))) for tool in use.tools)


def _strict(use: ToolUse) -> list[dict[str, Any]]:
    """The tools; of those that are not strict no more than that their arguments are an object."""
    return [dict(tool) if tool["name"] in use.strict else {"name": tool["name"]} for tool in use.tools]
