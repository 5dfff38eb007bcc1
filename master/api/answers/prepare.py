"""Preparation of a request: token ids, grammar and parser.

Preparing may be slow, so the server does it on a thread of its own.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from master.api.answers.formats import AnswerFormat, AnswerFormats
from master.api.answers.requests import ChatRequest, GenerationOptions, TextRequest
from master.api.failures import RequestError
from master.text.replay import Replay
from master.text.templates.traits import EFFORT, SWITCHES
from master.text.tokenizer import Tokenizer
from master.text.values import texts_of
from tpi.errors import ModelError

_SURELY_FEWER = 64  # bytes of the longest usual token; only runs of one character make longer ones
_PROBE = 4  # characters per token; a longer text is encoded in pieces first, until it is known to be too long
_PIECE = 2
_BLANKS = 4  # tokens of white space that may follow the opening tag of reasoning at the end of a prompt


@dataclass(frozen=True)
class PreparedRequest:
    """A prompt as token ids (int array), the maximum number of tokens of its answer, and the answer's form."""

    tokens: Sequence[int]
    limit: int
    answer_format: AnswerFormat
    spelled: frozenset[int] = frozenset()
    replayable: bool = False
    echo: str = ""  # text that the answer begins with


class Preparer:
    """Turns requests into prompts for one model; it holds the tokenizer, the template and the answers given so far."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self.replay = Replay()
        self._tokenizer, self._context = tokenizer, context
        self._formats = AnswerFormats(tokenizer)

    @property
    def own_grammars(self) -> frozenset[str]:
        """The grammars of answers that are any JSON object. No other grammar is independent of the request."""
        return self._formats.any_object

    def chat(self, ask: ChatRequest) -> PreparedRequest:
        """Return a conversation as a prompt; raise a RequestError, which names the field, if it cannot be answered."""
        tokens = self.encode(ask)
        begun = self._begun(ask, tokens)
        replayable = not (begun or ask.continued or self._formats.channels)
        spelled = self._formats.spelled(bool(ask.use.tools))
        sized = self._sized(tokens, ask.options, ask.where)
        return PreparedRequest(*sized, self._formats.for_chat(ask, begun), spelled, replayable)

    def text(self, ask: TextRequest) -> PreparedRequest:
        """Return a text as a prompt; raise a RequestError, which names the field, if it cannot be answered."""
        if isinstance(ask.prompt, str):
            self._refuse_long([ask.prompt], ask.field)
            encode = self._tokenizer.encode_text if ask.literal else self._tokenizer.encode
            tokens = encode(ask.prompt)
        else:
            tokens = list(ask.prompt)
        sized = self._sized(tokens, ask.options, ask.field)
        return PreparedRequest(*sized, self._formats.for_text(ask.options), echo=self._echo(ask))

    def encode(self, ask: ChatRequest) -> list[int]:
        """Return the token ids of a conversation with its tools; raise RequestError if it is too long or is refused."""
        if len(ask.messages) >= self._context:  # each message makes at least one token
            raise self._too_long(f"{len(ask.messages)} messages", ask.where)
        self._refuse_long(list(texts_of((ask.messages, ask.use.tools))), ask.where)
        replay = self.replay.find(ask.messages, ask.client.salt)
        names = {**self._switches(ask), **ask.template}
        try:
            self._refuse_unread(ask)
            return self._tokenizer.encode_chat(ask.messages, replay, names, ask.use.tools, ask.continued)
        except ModelError as error:
            reason = getattr(error, "reason", "it failed; the server's log says why")
            said = f"the model's chat template refused the conversation: {reason}"
            raise RequestError(said, ask.where, "template_refused") from error

    def effort(self, ask: ChatRequest) -> str | None:
        """Return the reasoning effort for the chat template; None if none is requested or the template reads none."""
        return ask.effort if ask.effort is not None and self._read(ask) else None

    def ignored_settings(self, ask: ChatRequest) -> tuple[str, ...]:
        """Return the requested settings (`effort`, `thinking`) that the chat template cannot express."""
        read = self._read(ask) if (ask.effort, ask.thinking) != (None, None) else frozenset()
        thinks, switched = self._formats.thinking is not None, bool(read & {*SWITCHES})
        effort = ask.effort is not None and not (EFFORT in read or (switched and ask.thinking is None))
        thinking = ask.thinking is not None and not switched and ask.thinking is not thinks
        return ("effort",) * effort + ("thinking",) * thinking

    def _switches(self, ask: ChatRequest) -> dict[str, object]:
        """Return the template variables for the reasoning effort.

        Raises:
            RequestError: if the client set the effort in the request field for it and the template has no such
            variable.
        """
        found: dict[str, object] = {}
        if ask.effort is None and ask.thinking is None:
            return found
        thinks = ask.thinking if ask.thinking is not None else ask.effort != "none"
        for name in self._read(ask):
            if name != EFFORT:
                found[name] = thinks
            elif ask.effort is not None:
                found[name] = ask.effort
        if not found and ask.effort_field and not (ask.effort == "none" and self._formats.thinking is None):
            said = f"{ask.effort_field}: this model cannot be told how much to think; leave it out"
            raise RequestError(said, ask.effort_field, "unsupported_parameter")
        return found

    def _refuse_unread(self, ask: ChatRequest) -> None:
        """Raise RequestError for given variables that the template does not read, unless they have the default
        values.
        """
        given = {name: value for name, value in ask.template.items() if name != "add_generation_prompt"}
        unread = given.keys() - self._tokenizer.names_read(bool(ask.use.tools)) if given else ()
        thinks = self._formats.thinking is not None
        for name in sorted(unread):
            if (name in SWITCHES and given[name] is thinks) or (
                name == EFFORT and given[name] == "none" and not thinks
            ):
                continue
            field = f"chat_template_kwargs.{name}"
            said = "the chat template of this model does not read this name; leave it out"
            raise RequestError(f"{field}: {said}", field, "unsupported_parameter")

    def _read(self, ask: ChatRequest) -> frozenset[str]:
        return self._tokenizer.traits(bool(ask.use.tools)).switches

    def _sized(self, tokens: list[int], wanted: GenerationOptions, field: str) -> tuple[Sequence[int], int]:
        if not tokens:
            raise RequestError("the prompt is empty", field)
        if len(tokens) >= self._context:
            raise self._too_long(f"{len(tokens)} tokens", field)
        room = self._context - len(tokens)
        return array("i", tokens), room if wanted.tokens is None else min(wanted.tokens, room)

    def _echo(self, ask: TextRequest) -> str:
        if not ask.echo:
            return ""
        return ask.prompt if isinstance(ask.prompt, str) else self._tokenizer.spelling(ask.prompt)

    def _refuse_long(self, texts: Sequence[str], field: str) -> None:
        """Raise RequestError for a text that is far longer than the context, without encoding all of it."""
        total, size = sum(map(len, texts)), _PIECE * self._context
        if total > _SURELY_FEWER * self._context:
            raise self._too_long(f"{total} characters", field)
        if total <= _PROBE * self._context:
            return
        text, tokens = "".join(texts), 0
        for first in range(0, total, size):
            tokens += len(self._tokenizer.encode(text[first : first + size], special=False))
            if tokens > self._context + total // size:  # a cut may turn one token into two
                raise self._too_long(f"{total} characters", field)

    def _too_long(self, size: str, field: str) -> RequestError:
        said = f"the prompt has {size}, over the context of {self._context} tokens; shorten it"
        return RequestError(said, field, "context_length_exceeded")

    def _begun(self, ask: ChatRequest, tokens: Sequence[int]) -> bool:
        if self._formats.thinking is None:
            return False
        if ask.continued and ask.messages[-1]["content"]:
            opening, closing = self._formats.thinking
            _, begun, rest = ask.messages[-1]["content"].rpartition(opening)
            return bool(begun) and closing not in rest
        opening = self._formats.thinking[0]
        last = tokens[-len(opening.encode()) - _BLANKS :]  # a token is at least a byte
        return self._tokenizer.spelling(last).rstrip().endswith(opening)
