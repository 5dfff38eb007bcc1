"""A conversation in a context of limited length: the oldest turns go, the system message stays."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from master.chat.conversation import Conversation
from master.text.tokenizer import Message
from tpi.errors import UsageError

_KEPT = 0.75  # of a full context: so that it is not full again, and computed anew, at the next turn


def fit(
    conversation: Conversation,
    user: str,
    encode: Callable[[Sequence[Message]], list[int]],
    context: int,
    answer: int | None,
    what: str = "this message",
) -> list[int]:
    """Token ids of the conversation with `user` said next; drops its oldest turns where it would not fit.

    An answer of `answer` tokens has room then, at most a quarter of `context`; None: a quarter. `what` is what an error
    says does not fit.

    Raises:
        UsageError: if `user`, with the system message, does not fit alone; nothing is dropped.
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
        raise UsageError(f"{what} takes {len(ids)} tokens, over the context of {context}; say less at once")
    conversation.dropped = dropped
    return ids
