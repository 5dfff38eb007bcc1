"""Preparation of a batch line for the engine: its prompts as token ids, and the form of its answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from master.api.answers.answering import PendingAnswer
from master.api.answers.events import Event
from master.api.answers.prepare import PreparedRequest
from master.api.answers.requests import ChatRequest, TextRequest
from master.api.answers.service import Service
from master.api.failures import RequestError
from master.api.forms import refuse
from master.api.openai.chat import chat_completion
from master.api.openai.chat_form import ChatForm
from master.api.openai.completions import CompletionForm, text_completion
from master.api.senders import Sender
from master.api.streams import collected
from master.batch.balance import Lengths
from master.batch.source import URLS, BatchLine, BatchRequest
from master.generation.client import Client

_SENDER = Sender("batch", b"", b"")  # all lines have the same sender, so they begin in order


@dataclass(frozen=True)
class ReadyLine:
    """A line with its prepared prompts. Each prompt may have several answers."""

    line: BatchLine
    form: ChatForm | CompletionForm
    prompts: Sequence[tuple[ChatRequest | TextRequest, PreparedRequest]]

    @property
    def lengths(self) -> Lengths:
        """The number of tokens of all prompts, and the maximum number of all answers together."""
        prompt = sum(len(ready.tokens) for _, ready in self.prompts)
        return Lengths(prompt, sum(ready.limit * ask.options.count for ask, ready in self.prompts))

    async def answer(self, service: Service, model: str) -> dict[str, Any]:
        """Generate the answers and return OpenAI's object. The object has the line's model name, or else `model`.

        Raises:
            UsageError: if the request cannot be answered.
            TpiError: if the engine fails.
        """
        answers: list[PendingAnswer] = []
        try:
            for ask, ready in self.prompts:
                answers += await service.begin(ready, ask.options, ask.client)
            return self._whole(await collected(answers), [one.echo for one in answers], self.form.model or model)
        finally:
            for one in answers:
                one.cancel()

    def _whole(self, got: Sequence[Sequence[Event]], echoes: Sequence[str], model: str) -> dict[str, Any]:
        if isinstance(self.form, ChatForm):
            whole = chat_completion(got, model, self.form)
        else:
            whole = text_completion(got, echoes, model, self.form)
        whole.pop("timings")  # answers share steps, so the times say nothing about one of them
        return whole


async def made_ready(line: BatchLine, request: BatchRequest, service: Service, names: Sequence[str]) -> ReadyLine:
    """Prepare a line's request for the engine; `names` are all names of the model.

    Raises:
        RequestError: if the request cannot be answered; the message names the field.
    """
    form = _form(request)
    if form.model is not None and form.model not in names:
        known = " or ".join(map(repr, names))
        said = f"the model is called {known}, not {form.model!r:.100}; add that name with --alias"
        raise RequestError(said, "model", "model_not_found", 404)
    client = Client(_SENDER.name, _SENDER.salted(form.salts()))
    asks = [form.ask(client)] if isinstance(form, ChatForm) else form.asks(client)
    return ReadyLine(line, form, [(ask, await service.prepare(ask)) for ask in asks])


def _form(request: BatchRequest) -> ChatForm | CompletionForm:
    kind = ChatForm if request.url == URLS[0] else CompletionForm
    try:
        return kind.model_validate(request.body)
    except ValidationError as error:
        raise refuse(error.errors(), request.body) from None
