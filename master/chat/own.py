"""A conversation with a model of this session: keys and values of earlier turns are kept."""

from collections.abc import Callable
from collections.abc import Sequence as Messages

from master.chat.conversation import Conversation
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
        self, session: Session, sampler: Sampler, tokens: int, conversation: Conversation, screen: Screen
    ) -> None:
        """`tokens` is the most that an answer may have."""
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

    def reply(self, text: str, stopped: Callable[[], bool], warn: Callable[[str], None]) -> Answer:
        """See `Talk`."""
        before = self.conversation.dropped
        wanted = fit(self.conversation, text, self._encode, self.context, self._tokens)
        if dropped := self.conversation.dropped - before:
            warn(self.full(dropped, self._session.pack.config.context))
        self._begin(wanted)
        assert self._sequence
        limits, show = AnswerLimits(self._tokens), self.screen.write
        try:
            result = stream_answer(self._session, self._sequence, self._sampler, limits, show, stopped)
        finally:
            self.screen.end()
        self.used = len(self._sequence.tokens)
        self._remember(result)
        self.keep(text, result)
        return result

    def _encode(self, messages: Messages[Message]) -> list[int]:
        """A conversation, with the very tokens of the answers that were given in it."""
        return self._session.tokenizer.encode_chat(messages, self._replay.find(messages))

    def _remember(self, result: Answer) -> None:
        tokens = result.token_ids
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
