"""Answering of a batch: unanswered lines are read in windows, sorted by length, and queued for the engine."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from master.api.answers.events import Ended
from master.api.answers.service import Service
from master.api.failures import RequestError, failure_of, openai_form
from master.batch.balance import in_order
from master.batch.prompts import ReadyLine, made_ready
from master.batch.results import OK, BatchResults
from master.batch.source import BatchLine, BatchRequest, BatchSource, parsed
from master.generation.thread import Ticket
from tpi.errors import UsageError
from tpi.kernels.spec import PAGE_TOKENS
from tpi.progress import Progress

_WINDOW = 4  # lines that are sorted together, as a multiple of the lines that run at once
_AHEAD = 2  # queued lines with prepared prompts, for each line that runs


@dataclass
class BatchCounts:
    """Counts of this run's answers and tokens: an `AnswerMeter` (`master.api.answers.collector`) without times."""

    answered: int = 0  # lines answered in this run, refused ones included
    refused: int = 0
    prompt_tokens: int = 0
    made_tokens: int = 0

    def first_token(self, seconds: float) -> None:
        """Ignore the time: a batch reports none."""

    def next_token(self, seconds: float) -> None:
        """Ignore the time: a batch reports none."""

    def over(self, ticket: Ticket, prompt_tokens: int, ended: Ended | None) -> None:
        """Add the tokens of an answer to the counts."""
        if ended is not None:
            self.prompt_tokens += prompt_tokens
            self.made_tokens += ended.completion_tokens


class BatchAnswering:
    """One run over a batch.

    `names` are the names of the model; `service` reports its tokens to `counts`.
    """

    def __init__(
        self,
        service: Service,
        names: Sequence[str],
        source: BatchSource,
        results: BatchResults,
        counts: BatchCounts,
        progress: Progress,
    ) -> None:
        self._service, self._names, self._source, self._results = service, names, source, results
        self._counts, self._progress = counts, progress
        self._at_once = service.engine.engine.admission.most

    async def run(self) -> None:
        """Answer all lines that have no answer yet.

        Raises:
            TpiError: if the engine fails. Answers already written stay.
            OSError: if an answer cannot be written.
        """
        self._report()
        ready: asyncio.Queue[ReadyLine | None] = asyncio.Queue(_AHEAD * self._at_once)
        await _all_or_none([self._feed(ready), *(self._take(ready) for _ in range(self._at_once))])

    async def _feed(self, ready: "asyncio.Queue[ReadyLine | None]") -> None:
        """Put prepared lines into the queue `ready`, window by window, in the order of `in_order`.

        Then end the queue.
        """
        left = (line for line in self._source.lines if line.id not in self._results.answered)
        while window := list(islice(left, _WINDOW * self._at_once)):
            lines = [line async for line in self._prepared(window)]
            for at in in_order([line.lengths for line in lines], self._at_once, self._room):
                await ready.put(lines[at])
        for _ in range(self._at_once):
            await ready.put(None)

    async def _prepared(self, window: Sequence[BatchLine]) -> AsyncIterator[ReadyLine]:
        for line in window:
            if (request := self._request(line)) is not None:
                try:
                    yield await made_ready(line, request, self._service, self._names)
                except UsageError as error:
                    self._refuse(line, error)

    def _request(self, line: BatchLine) -> BatchRequest | None:
        """Return a line's request; if it is not valid, write the error as the line's answer and return None."""
        try:
            return parsed(self._source.read(line))
        except RequestError as error:
            said = f"line {line.number}: {error}"
            self._write(line, {"response": None, "error": {"code": error.code, "message": said}}, refused=True)
            return None

    async def _take(self, ready: "asyncio.Queue[ReadyLine | None]") -> None:
        """Answer the lines of the queue `ready` one after the other, until the queue ends.

        Several of these tasks run at once, and the engine batches their requests.
        """
        while (one := await ready.get()) is not None:
            await self._answer(one)

    async def _answer(self, one: ReadyLine) -> None:
        try:
            body = await one.answer(self._service, self._names[0])
        except UsageError as error:
            if error is self._service.engine.problem:  # the engine failed, not the request
                raise
            self._refuse(one.line, error)
        else:
            self._write(one.line, _response(one.line, OK, body))

    @property
    def _room(self) -> int:
        return self._service.engine.engine.deployment.pages.total * PAGE_TOKENS

    def _refuse(self, line: BatchLine, error: UsageError) -> None:
        failure = failure_of(error)
        self._write(line, _response(line, failure.status, openai_form(failure)), refused=True)

    def _write(self, line: BatchLine, fields: dict[str, Any], refused: bool = False) -> None:
        self._results.write(line, fields)
        self._counts.answered += 1
        self._counts.refused += refused
        self._report()

    def _report(self) -> None:
        self._progress(len(self._results.answered), len(self._source.lines))


def _response(line: BatchLine, status: int, body: dict[str, Any]) -> dict[str, Any]:
    request = line.id.replace("batch_", "", 1)
    return {"response": {"status_code": status, "request_id": request, "body": body}, "error": None}


async def _all_or_none(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait until all of `work` is done; if one task fails or this coroutine is cancelled, cancel the others first."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
