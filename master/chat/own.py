"""A conversation with a model of this session: keys and values of earlier turns are kept."""

from collections.abc import Callable
from collections.abc import Sequence as Messages
from functools import partial

from master.chat.conversation import Conversation, Turn
from master.chat.fitting import fit
from master.chat.showing.screen import Screen
from master.chat.talk import Talk, said_in
from master.generation.answer import Answer, AnswerLimits
from master.generation.sampler import Sampler
from master.generation.sequence import Sequence
from master.reporting.output import stream_answer
from master.session import Session
from master.text.replay import Replay
from master.text.tokenizer import Message


class OwnTalk(Talk):
    """A conversation, and what the engine has computed of it."""

    def __init__(
        self, session: Session, sampler: Sampler, tokens: int | None, conversation: Conversation, screen: Screen
    ) -> None:
        """`tokens` is the most that an answer may have; None: what the context has room for."""
        super().__init__(conversation, session.engine.context, screen)
        self._session = session
        self._sampler = sampler
        self._tokens = tokens
        self._sequence: Sequence | None = None
        self._replay = Replay()

    def check_system(self, system: str | None) -> None:
        """See `Talk`."""
        probe = Conversation(system)
        fit(probe, "?", self._session.tokenizer.encode_chat, self.context, self._tokens)

    def _answer(
        self, text: str, begun: Turn | None, stopped: Callable[[], bool], warn: Callable[[str], None]
    ) -> Answer:
        """See `Talk`."""
        before, said = self.conversation.dropped, self._tokens_of(begun)
        what = "this answer, with what it answers," if begun else "this message"
        encode = partial(self._encode, said=said)
        wanted = fit(self.conversation, text, encode, self.context, self._tokens, what)
        if dropped := self.conversation.dropped - before:
            warn(self.full(dropped, self._session.pack.config.context))
        self._begin(wanted)
        assert self._sequence
        limits, show = AnswerLimits(self._tokens or self.context), self.screen.write
        if begun is not None:
            self.screen.resume(begun.shown or begun.assistant)
        try:
            result = stream_answer(self._session, self._sequence, self._sampler, limits, show, stopped, said)
        finally:
            self.screen.end()
        self.used = len(self._sequence.tokens)
        self._remember(result, said)
        return result

    def _encode(self, messages: Messages[Message], said: Messages[int]) -> list[int]:
        """A conversation, with the very tokens of the answers that were given in it, and with what is `said` of one."""
        return [*self._session.tokenizer.encode_chat(messages, self._replay.find(messages)), *said]

    def _tokens_of(self, begun: Turn | None) -> list[int]:
        """The tokens of an answer that is to be continued; of one from a file those of its text."""
        if begun is None:
            return []
        return list(begun.tokens) or self._session.tokenizer.encode(begun.assistant, special=False)

    def _remember(self, result: Answer, before: Messages[int]) -> None:
        tokens = [*before, *result.token_ids]
        if tokens and (said := said_in(result)):
            at_end = tokens[-1] in self._session.tokenizer.eos_ids
            self._replay.remember(said, (), tokens[:-1] if at_end else tokens, thought=result.said is not None)

    def _begin(self, tokens: list[int]) -> None:
        """A sequence of `tokens`, which begins with what the last one has computed of them."""
        engine = self._session.engine
        if self._sequence:
            engine.release(self._sequence)
        self._sequence = engine.admit(tokens, reuse=True)
        self._sequence.begin(engine.deployment.pages)
