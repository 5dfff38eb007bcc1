"""From what is asked to token ids, a grammar and a parser. Runs on one thread, which may be busy for a moment."""

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from master.api.answers import grammars
from master.api.answers.ask import ChatAsk, TextAsk, ToolUse, Wanted
from master.api.failures import RequestError
from master.api.tools.families import SPELLED, family_of, reasoning_tags
from master.api.tools.harmony import HarmonyParser
from master.api.tools.parser import NoTools, ToolParser
from master.api.tools.reasoning import ReasoningParser
from master.text.channels import has_channels
from master.text.replay import Replay
from master.text.tokenizer import Message, Tokenizer
from master.text.values import texts_of
from tpi.errors import ModelError

_SURELY_FEWER = 64  # bytes of a token; longer ones are runs of one character
_PROBE = 4  # characters a token: a text that is longer is encoded piece by piece first, until it is too long
_PIECE = 2
_TAIL = 8  # tokens in which the opening of a thought is looked for


@dataclass(frozen=True)
class PreparedAsk:
    """A prompt with what reads the answer; `parser` makes a new one for each of several answers.

    `grammar` is that of the whole output, not compiled yet; `grammar_field` is where the client asked for it.
    """

    tokens: Sequence[int]
    limit: int
    parser: Callable[[], ToolParser]
    grammar: str | None = None
    grammar_field: str = ""
    spelled: frozenset[int] = frozenset()
    replayable: bool = False
    echo: str = ""  # what the answer is to begin with


class Preparer:
    """Knows the model's tokenizer and template, and the answers given so far."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self.replay = Replay()
        self.family = family_of(tokenizer.chat_template)
        self._tokenizer, self._context = tokenizer, context
        self._thinking, self._channels = reasoning_tags(tokenizer.chat_template), has_channels(tokenizer.chat_template)
        self._literal = grammars.literal_of(tokenizer.control)
        self._spelled = frozenset(token for text in SPELLED if (token := tokenizer.control(text)) is not None)

    def chat(self, ask: ChatAsk) -> PreparedAsk:
        """Raises RequestError, naming the field, if it cannot be answered."""
        tokens = self.encode(ask)
        names = [tool["name"] for tool in ask.use.tools]
        begun = self._begun(tokens)
        grammar, field = self._grammar(ask, begun)

        def parser() -> ToolParser:
            inner = self.family.parser(names) if names else NoTools()
            if self._channels:
                return HarmonyParser(inner)
            return ReasoningParser(self._thinking, begun, inner) if self._thinking else inner

        return self._prepared(
            tokens, ask.wanted, ask.where, parser, grammar, field, self._spelled, not (begun or self._channels)
        )

    def text(self, ask: TextAsk) -> PreparedAsk:
        """Raises RequestError, naming the field, if it cannot be answered."""
        if isinstance(ask.prompt, str):
            self._refuse_long([ask.prompt], ask.field)
            tokens = self._tokenizer.encode(ask.prompt)
        else:
            tokens = list(ask.prompt)
        answer = ask.wanted.grammar
        grammar = grammars.whole(answer, None, False, self._literal) if answer else None
        return self._prepared(tokens, ask.wanted, ask.field, NoTools, grammar, ask.wanted.grammar_field)

    def encode(self, ask: ChatAsk) -> list[int]:
        """Token ids of a conversation with its tools. Errors as `chat`."""
        if len(ask.messages) >= self._context:  # each has a token at least, and is marked, rendered, encoded
            raise self._too_long(f"{len(ask.messages)} messages", ask.where)
        self._refuse_long(list(texts_of((ask.messages, ask.use.tools))), ask.where)
        messages, names = self._told(ask)
        replay = self.replay.find(messages)
        try:
            try:
                return self._tokenizer.encode_chat(messages, replay, **names)
            except ModelError:
                if not replay:
                    raise
                return self._tokenizer.encode_chat(messages, **names)  # a template that looks into its own turns
        except ModelError as error:
            raise RequestError(str(error), ask.where, "template_refused") from error

    def _told(self, ask: ChatAsk) -> tuple[Sequence[Message], dict[str, Any]]:
        """The messages, and what the template is given; where it knows nothing of tools, a system message tells."""
        names: dict[str, Any] = dict(ask.template)
        if not ask.use.tools:
            return ask.messages, names
        if self.family.told:
            names["tools"] = [{"type": "function", "function": dict(tool)} for tool in ask.use.tools]
            return ask.messages, names
        return _with_system([_as_text(message) for message in ask.messages], _description(ask.use)), names

    def _grammar(self, ask: ChatAsk, begun: bool) -> tuple[str | None, str]:
        """The grammar of the whole output, and where the client asked for it."""
        use, wanted = ask.use, ask.wanted
        answer, field = wanted.grammar, wanted.grammar_field
        if use.forced:
            tools = [dict(tool) for tool in use.tools if use.only in (None, tool["name"])]
            answer, field = grammars.of_calls(self.family, tools, use.several, self._literal), "tools"
        if answer is None:
            return None, field
        return grammars.whole(answer, self._thinking, begun, self._literal), field

    def _prepared(
        self,
        tokens: list[int],
        wanted: Wanted,
        field: str,
        parser: Callable[[], ToolParser],
        grammar: str | None,
        grammar_field: str,
        spelled: frozenset[int] = frozenset(),
        replayable: bool = False,
    ) -> PreparedAsk:
        if not tokens:
            raise RequestError("the prompt is empty", field)
        if len(tokens) >= self._context:
            raise self._too_long(f"{len(tokens)} tokens", field)
        room = self._context - len(tokens)
        limit = room if wanted.tokens is None else min(wanted.tokens, room)
        return PreparedAsk(array("i", tokens), limit, parser, grammar, grammar_field, spelled, replayable)

    def _refuse_long(self, texts: Sequence[str], field: str) -> None:
        """Refuse at once what is far over the context, without encoding all of it."""
        total, size = sum(map(len, texts)), _PIECE * self._context
        if total > _SURELY_FEWER * self._context:
            raise self._too_long(f"{total} characters", field)
        if total <= _PROBE * self._context:
            return
        text, tokens = "".join(texts), 0
        for first in range(0, total, size):
            tokens += len(self._tokenizer.encode(text[first : first + size], special=False))
            if tokens > self._context + total // size:  # a cut makes a token of two
                raise self._too_long(f"{total} characters", field)

    def _too_long(self, size: str, field: str) -> RequestError:
        said = f"the prompt has {size}, over the context of {self._context} tokens; shorten it"
        return RequestError(said, field, "context_length_exceeded")

    def _begun(self, tokens: Sequence[int]) -> bool:
        """Whether the prompt ends with the opening of a thought."""
        if self._thinking is None:
            return False
        return self._tokenizer.spelling(tokens[-_TAIL:]).rstrip().endswith(self._thinking[0])


def _description(use: ToolUse) -> str:
    """What a model is told of tools where its template has no words for them."""
    tools = "\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in use.tools)
    how = "To call one, answer with a JSON object and nothing else"  # the same whether it must: the prefix is cached
    return f'You can call these tools:\n{tools}\n{how}: {{"name": TOOL, "arguments": {{...}}}}'


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _as_text(message: Message) -> Message:
    """Calls and results as text, for templates that know none."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"The tool answered: {message['content']}"}
    if not message.get("tool_calls"):
        return message
    calls = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in message["tool_calls"]
    ]
    said = "\n".join(json.dumps(call, ensure_ascii=False) for call in calls)
    return {**message, "content": f"{message['content']}\n{said}".strip()}
