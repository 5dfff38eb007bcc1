"""The core of the server, used by every API form: it submits requests to the engine's thread and awaits the answers."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from master.api.answers.answering import PendingAnswer
from master.api.answers.collector import AnswerMeter, Collector
from master.api.answers.constraint import AT_ONCE, GrammarConstraint, Grammars
from master.api.answers.prepare import PreparedRequest, Preparer
from master.api.answers.requests import ChatRequest, GenerationOptions, TextRequest
from master.api.answers.turns import FairExecutor
from master.api.failures import RequestError
from master.generation.answer import AnswerLimits
from master.generation.client import Client
from master.generation.defaults import SamplingDefaults
from master.generation.request import Sampled
from master.generation.thread import EngineRequest, EngineThread, Ticket
from master.text.tokenizer import Tokenizer
from master.vocabulary.sampler import RANDOM_SEED, Sampler, Sampling
from tpi.errors import TpiError

F32 = npt.NDArray[np.float32]
T = TypeVar("T")


class Service:
    """Answers requests with one engine. Call the coroutines on one event loop."""

    def __init__(self, engine: EngineThread, tokenizer: Tokenizer, vocab: int, meter: AnswerMeter) -> None:
        self.engine = engine
        self.context = engine.engine.context
        self._tokenizer, self._vocab, self._meter = tokenizer, vocab, meter
        self._defaults = SamplingDefaults.of(tokenizer.info)
        self._preparer = Preparer(tokenizer, self.context)
        self._grammars = Grammars(tokenizer, vocab)
        self._text, self._grammar = FairExecutor("text"), ThreadPoolExecutor(AT_ONCE, "grammar")
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    def warm_up(self) -> None:
        """Load llguidance, and compile the server's own grammars, in the background."""
        self._grammar.submit(self._grammars.prepare, self._preparer.own_grammars)

    async def chat(self, ask: ChatRequest) -> list[PendingAnswer]:
        """Start `ask.options.count` answers to a conversation and return them.

        Raises:
            RequestError: if the conversation cannot be answered.
            BusyError: if too many requests wait.
        """
        return await self.begin(await self.prepare(ask), ask.options, ask.client)

    async def text(self, ask: TextRequest) -> list[PendingAnswer]:
        """Start `ask.options.count` answers that continue a text; raise the same errors as `chat`."""
        return await self.begin(await self.prepare(ask), ask.options, ask.client)

    async def prepare(self, ask: ChatRequest | TextRequest) -> PreparedRequest:
        """Prepare a request for `begin`; raise RequestError if it cannot be answered."""
        self._check_bias(ask.options.sampling)
        if isinstance(ask, ChatRequest):
            prepared = await self._text.run(ask.client.name, lambda: self._preparer.chat(ask))
        else:
            self._check_tokens(ask.prompt, ask.field)
            prepared = await self._text.run(ask.client.name, lambda: self._preparer.text(ask))
        await self._constraints(prepared, 0, ask.client)  # refuse an invalid grammar now, not when the answer begins
        return prepared

    async def effort(self, ask: ChatRequest) -> str | None:
        """Return the reasoning effort for the chat template; None if none is requested or the template reads none."""
        if ask.effort is None:
            return None
        return await self._text.run(ask.client.name, lambda: self._preparer.effort(ask))

    async def ignored_settings(self, ask: ChatRequest) -> tuple[str, ...]:
        """Return the requested settings (`effort`, `thinking`) that the model's chat template cannot express."""
        if ask.effort is None and ask.thinking is None:
            return ()
        return await self._text.run(ask.client.name, lambda: self._preparer.ignored_settings(ask))

    async def count(self, ask: ChatRequest) -> int:
        """Return the number of tokens of a conversation; raise the same errors as `chat`."""
        return len(await self._text.run(ask.client.name, lambda: self._preparer.encode(ask)))

    async def embed(self, ask: TextRequest) -> tuple[F32, int]:
        """Return the embedding of a text, and its number of tokens; raise the same errors as `chat`.

        The embedding `[hidden]` is the sum of the last hidden states, scaled to length 1 (float32).
        """
        self._check_tokens(ask.prompt, ask.field)
        prepared = await self._text.run(ask.client.name, lambda: self._preparer.text(ask))
        head = self.engine.engine.deployment.vocabulary.head
        total, done = np.zeros(0, np.float32), _Done()

        def add(rows: F32) -> None:
            nonlocal total
            summed = head.norm(rows).sum(axis=0)
            total = total + summed if total.size else summed

        ticket = Ticket(
            EngineRequest(prepared.tokens, Sampler(Sampling(temperature=0)), 1, rows=add, client=ask.client), done
        )
        self.engine.submit(ticket)
        try:
            await done.wait()
        finally:
            self.engine.cancel(ticket)
        return total / max(float(np.linalg.norm(total)), 1e-12), len(prepared.tokens)

    def close(self) -> None:
        """Join the threads that prepare prompts and grammars, and stop their child processes."""
        self._text.close()
        self._grammar.shutdown(cancel_futures=True)
        self._tokenizer.close()
        self._grammars.close()

    async def begin(self, prepared: PreparedRequest, wanted: GenerationOptions, client: Client) -> list[PendingAnswer]:
        """Start `wanted.count` answers to a prepared request; raise BusyError if too many requests wait."""
        constraints = await self._constraints(prepared, wanted.count, client)
        samplers = [_sampler(constraint, wanted, index, self._defaults) for index, constraint in enumerate(constraints)]
        limits = AnswerLimits(prepared.limit, wanted.stops, wanted.ignore_eos)
        answers, first = list[PendingAnswer](), None
        try:
            for sampler in samplers:
                one = PendingAnswer(self.engine, prepared.echo)
                collector = Collector(
                    self._tokenizer, prepared, limits, self._preparer.replay, self._meter, one.deliver
                )
                asked = EngineRequest(prepared.tokens, sampler, prepared.limit, client=client, logprobs=wanted.logprobs)
                collector.ticket = Ticket(asked, collector, first)
                one.begin(collector.ticket)
                first = first or collector.ticket
                answers.append(one)
        except BaseException:  # the caller would not know of the answers that have begun
            for one in answers:
                one.cancel()
            raise
        return answers

    async def _constraints(
        self, prepared: PreparedRequest, count: int, client: Client
    ) -> list[GrammarConstraint | None]:
        """Return a constraint for each of `count` answers. The grammar is compiled even if `count` is 0.

        The grammars of one client are compiled one after the other, so that one client never occupies both compiler
        threads.

        Raises:
            RequestError: if the grammar is not valid, or takes too much time or memory.
        """
        grammar, field = prepared.answer_format.grammar, prepared.answer_format.field
        if grammar is None:
            return [None] * count

        def made() -> GrammarConstraint:
            try:
                return self._grammars.compiled(grammar, field)
            except RequestError:
                self._blame(prepared.answer_format.parts, field)
                raise

        compiled = self._grammars.cached(grammar)
        if compiled is None:
            turn = self._turns.setdefault(client.name, asyncio.Lock())
            async with turn:
                compiled = await _within(self._grammar, made)
        return [compiled.copy() for _ in range(count)]

    def _blame(self, parts: Sequence[tuple[str, str]], field: str) -> None:
        """Raise RequestError, which names the part, if the grammar of one of `parts` cannot be compiled by itself."""
        for name, grammar in parts:
            self._grammars.compiled(f"start: answer\n{grammar}", field, f"{field}: {name}")

    def _check_tokens(self, prompt: str | Sequence[int], field: str) -> None:
        if not isinstance(prompt, str) and not all(0 <= token < self._vocab for token in prompt):
            raise RequestError(f"token ids must be from 0 to {self._vocab - 1}", field)

    def _check_bias(self, sampling: Sampling) -> None:
        if not all(0 <= token < self._vocab for token in sampling.bias):
            raise RequestError(f"token ids must be from 0 to {self._vocab - 1}", "logit_bias")


class _Done:
    """A `Listener` for a request that generates no tokens: it resolves a future when the request ends."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()

    def token(self, sampled: Sampled) -> bool:
        return False

    def ended(self, error: TpiError | None) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set, error)

    def _set(self, error: TpiError | None) -> None:
        if self._over.cancelled():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    async def wait(self) -> None:
        await self._over


async def _within(thread: ThreadPoolExecutor, function: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, function)


def _sampler(
    constraint: GrammarConstraint | None, wanted: GenerationOptions, index: int, defaults: SamplingDefaults
) -> Sampler:
    """Return the sampler of answer number `index`; with a seed, each answer draws different but repeatable tokens."""
    sampling, seed = defaults.under(wanted.sampling), wanted.sampling.seed
    if index and seed not in (None, RANDOM_SEED):
        assert seed is not None
        sampling = replace(sampling, seed=(seed + index) % (1 << 63))
    return Sampler(sampling, constraint)
