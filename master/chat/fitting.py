"""Fitting a conversation into a context: the oldest turns are dropped, and the system message stays."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from master.chat.conversation import Conversation
from master.text.tokenizer import Message
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
