"""One conversation with a model: text in, an answer out, keys and values of earlier turns kept."""

from collections.abc import Callable

from master.chat.conversation import Conversation, Turn
from master.chat.fitting import fit
from master.generation.answer import Answer, AnswerLimits
from master.generation.sampler import Sampler
from master.generation.sequence import Sequence
from master.reporting.output import stream_answer, write
from master.session import Session


class Talk:
    """A conversation, and what the engine has computed of it."""

    def __init__(self, session: Session, sampler: Sampler, tokens: int, conversation: Conversation) -> None:
        """`tokens` is the most that an answer may have."""
        self.conversation = conversation
        self.context = session.engine.context
        self._session = session
        self._sampler = sampler
        self._tokens = tokens
        self._sequence: Sequence | None = None

    @property
    def used(self) -> int:
        """Tokens of the context that are taken."""
        return len(self._sequence.tokens) if self._sequence else 0

    def check_system(self, system: str | None) -> None:
        """Raises ModelError if the model's chat template takes no such system message, UsageError if it is too long."""
        probe = Conversation(system)
        fit(probe, "?", self._session.tokenizer.encode_chat, self.context, self._tokens)

    def reply(self, text: str, stopped: Callable[[], bool], warn: Callable[[str], None]) -> Answer:
        """Answer `text`, streaming to stdout; `warn` is told if turns had to be dropped.

        An answer that is stopped before its first letter leaves the conversation as it was.

        Raises:
            UsageError: if the text is too long, or the chat template refuses it.
            NodeError: if a worker is lost.
        """
        before = self.conversation.dropped
        wanted = fit(self.conversation, text, self._session.tokenizer.encode_chat, self.context, self._tokens)
        if dropped := self.conversation.dropped - before:
            warn(self._full(dropped))
        self._begin(wanted)
        assert self._sequence
        result = stream_answer(self._session, self._sequence, self._sampler, AnswerLimits(self._tokens), write, stopped)
        if result.text or result.finish_reason != "interrupted":
            self.conversation.turns.append(Turn(text, result.text))
        return result

    def regenerate(self, stopped: Callable[[], bool], warn: Callable[[str], None]) -> Answer:
        """Another answer instead of the last one, which stays if the new one is stopped before its first letter.

        The conversation has to have a turn. Errors as `reply`, after which the last answer stays, too.
        """
        turns, dropped = self.conversation.turns, self.conversation.dropped
        last = turns.pop()
        self.conversation.dropped = min(dropped, len(turns))
        before = len(turns)
        try:
            return self.reply(last.user, stopped, warn)
        finally:
            if len(turns) == before:
                turns.append(last)

    def _begin(self, tokens: list[int]) -> None:
        """A sequence of `tokens`, which begins with what the last one has computed of them."""
        engine = self._session.engine
        if self._sequence:
            engine.release(self._sequence)
        self._sequence = engine.admit(tokens, reuse=True)
        self._sequence.begin(engine.deployment.pages)

    def _full(self, dropped: int) -> str:
        many = f"the oldest {dropped} turns are" if dropped > 1 else "the oldest turn is"
        longest = self._session.pack.config.context
        more = "; a larger -c keeps more" if longest > self.context else ""
        return f"the context of {self.context} tokens is full: {many} dropped{more}"
