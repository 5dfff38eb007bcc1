"""A conversation with a model of this session. The KV cache of earlier turns is reused."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from collections.abc import Sequence as Messages
from functools import partial

from master.chat.conversation import Conversation, Turn
from master.chat.showing.screen import Screen
from master.chat.talk import ChatBackend, said_in
from master.generation.answer import Answer, AnswerLimits
from master.generation.thread import EngineThread
from master.reporting.output import stream_answer
from master.session import Session
from master.text.replay import Replay
from master.text.tokenizer import Message
from master.vocabulary.sampler import Sampler
from tpi.errors import UsageError

# part of the available tokens that is filled after dropping turns, so that the next turns fit without dropping again
_KEPT = 0.75


def fit(
    conversation: Conversation,
    user: str,
    encode: Callable[[Sequence[Message]], list[int]],
    context: int,
    answer: int | None,
    what: str = "this message",
) -> list[int]:
    """Return the token ids of the conversation followed by `user`, dropping its oldest turns if it does not fit.

    The result leaves room for an answer of `answer` tokens, at most a quarter of `context` (None: a quarter). `what` is
    the subject of the error message.

    Raises:
        UsageError: if `user` does not fit alone with the system message; nothing is dropped.
        ModelError: if the chat template refuses the conversation.
    """

    def tokens(dropped: int) -> list[int]:
        return encode(conversation.messages(user, dropped))

    room = context - min(answer or context, max(context // 4, 1))
    ids = tokens(conversation.dropped)
    if len(ids) <= room:
        return ids
    candidates = range(conversation.dropped, len(conversation.turns))
    dropped = conversation.dropped + bisect_left(candidates, True, key=lambda n: len(tokens(n)) <= _KEPT * room)
    ids = tokens(dropped)
    if len(ids) >= context:
        raise UsageError(f"{what} takes {len(ids)} tokens, over the context of {context}; shorten it")
    conversation.dropped = dropped
    return ids


class LocalChatBackend(ChatBackend):
    """A conversation with the model of a session, answered by its engine."""

    def __init__(
        self,
        session: Session,
        engine: EngineThread,
        sampler: Sampler,
        tokens: int | None,
        conversation: Conversation,
        screen: Screen,
    ) -> None:
        """Create a conversation; an answer has at most `tokens` tokens (None: the rest of the context)."""
        super().__init__(conversation, session.engine.context, screen)
        self._session = session
        self._engine = engine
        self._sampler = sampler
        self._tokens = tokens
        self._replay = Replay()

    def check_system(self, system: str | None) -> None:
        """Raise ModelError if the chat template refuses the system message, UsageError if it is too long."""
        probe = Conversation(system)
        fit(probe, "?", self._session.tokenizer.encode_chat, self.context, self._tokens)

    def _answer(
        self, text: str, begun: Turn | None, stopped: Callable[[], bool], warn: Callable[[str], None]
    ) -> Answer:
        before, said = self.conversation.dropped, self._tokens_of(begun)
        what = "this answer with its question" if begun else "this message"
        encode = partial(self._encode, said=said)
        wanted = fit(self.conversation, text, encode, self.context, self._tokens, what)
        if dropped := self.conversation.dropped - before:
            warn(self.full(dropped, self._session.pack.config.context))
        limits, show = AnswerLimits(self._tokens or self.context), self.screen.write
        if begun is not None:
            self.screen.resume(begun.shown or begun.assistant)
        try:
            figures, tokenizer = self._session.figures, self._session.tokenizer
            result = stream_answer(figures, tokenizer, self._engine, wanted, self._sampler, limits, show, stopped, said)
        finally:
            self.screen.end()
        self.used = len(wanted) + len(result.token_ids)
        self._remember(result, said)
        return result

    def _encode(self, messages: Messages[Message], said: Messages[int]) -> list[int]:
        """Return the token ids of a conversation, followed by `said`, the tokens of an answer to be continued.

        Earlier answers keep the tokens that were generated for them, so that the KV cache can be reused.
        """
        return [*self._session.tokenizer.encode_chat(messages, self._replay.find(messages)), *said]

    def _tokens_of(self, begun: Turn | None) -> list[int]:
        """Return the token ids of an answer to be continued; encode its text if the answer comes from a file."""
        if begun is None:
            return []
        return list(begun.tokens) or self._session.tokenizer.encode(begun.assistant, special=False)

    def _remember(self, result: Answer, before: Messages[int]) -> None:
        tokens = [*before, *result.token_ids]
        if tokens and (said := said_in(result)):
            at_end = tokens[-1] in self._session.tokenizer.eos_ids
            self._replay.remember(said, (), tokens[:-1] if at_end else tokens, thought=result.said is not None)
