"""The interface of a conversation with a model, on this machine or on a server."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from master.chat.conversation import Conversation, Turn
from master.chat.showing.screen import Screen
from master.generation.answer import Answer
from tpi.errors import UsageError


class ChatBackend(ABC):
    """A conversation with a model. `context` is its length limit in tokens, of which `used` are in use.

    `lasting` is True if the conversation can continue after a NodeError, because the server stores none of its state.
    """

    used = 0
    lasting = False

    def __init__(self, conversation: Conversation, context: int, screen: Screen) -> None:
        """Show the answers of `conversation` on `screen`; `context` is the context length in tokens."""
        self.conversation = conversation
        self.context = context
        self.screen = screen

    @abstractmethod
    def check_system(self, system: str | None) -> None:
        """Check the system message.

        Raises:
            ModelError: if the model's chat template refuses it.
            UsageError: if the message is too long.
        """

    @abstractmethod
    def _answer(
        self, text: str, begun: Turn | None, stopped: Callable[[], bool], warn: Callable[[str], None]
    ) -> Answer:
        """Show an answer to `text`, or continue the answer of `begun`, whose question is `text`.

        The result's text begins with the text of `begun`; its `token_ids` are only the new ones. Errors are those of
        `reply`.
        """

    def reply(self, text: str, stopped: Callable[[], bool], warn: Callable[[str], None]) -> Answer:
        """Answer `text`, streaming to the screen; call `warn` if turns had to be dropped.

        Only a turn whose answer has text is stored. If the answer is cut during the model's reasoning, the turns stay
        unchanged.

        Raises:
            UsageError: if the text is too long, or the chat template refuses it.
            NodeError: if a worker or the server is lost.
        """
        result = self._answer(text, None, stopped, warn)
        self.keep(text, result, None)
        return result

    def go_on(self, stopped: Callable[[], bool], warn: Callable[[str], None]) -> Answer:
        """Continue the last answer where it was cut, in the same turn. After an error, the turn is unchanged.

        Raises:
            UsageError: as for `reply`, and if there is no answer or the last one is complete.
            NodeError: as for `reply`.
        """
        turns, unsaid, dropped = self.conversation.turns, self.conversation.unsaid, self.conversation.dropped
        begun = self.conversation.unfinished
        if begun is None:
            reason = "the last answer is complete" if turns else "there is no answer yet"
            raise UsageError(f"{reason}: there is nothing to continue; write a message")
        if unsaid is None:
            turns.pop()
            self.conversation.dropped = min(dropped, len(turns))
        before = len(turns)
        try:
            result = self._answer(begun.user, begun, stopped, warn)
            self.keep(begun.user, result, begun)
            return result
        finally:
            if len(turns) == before and unsaid is None:
                turns.append(begun)

    def regenerate(self, stopped: Callable[[], bool], warn: Callable[[str], None]) -> Answer:
        """Replace the last answer by a new one. If the new answer has no text, the last answer stays.

        The conversation must have a turn. Errors are those of `reply`; after an error the last answer stays, too.
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
                self.conversation.unsaid = None

    def keep(self, text: str, result: Answer, begun: Turn | None) -> None:
        """Add the message `text` and its answer `result` to the conversation as a turn.

        An answer without text for the user is not added. If it was cut, it is stored so that `go_on` can continue it.
        `begun` is the turn whose answer this one continues, if any.
        """
        said, ended = said_in(result), result.finish_reason == "stop"
        tokens = (*(begun.tokens if begun else ()), *result.token_ids)
        turn = Turn(text, said, self.used, tokens, result.text, ended)
        self.conversation.unsaid = None if said or ended else turn
        if said:
            self.conversation.turns.append(turn)

    def full(self, dropped: int, longest: int) -> str:
        """Return the warning that the oldest `dropped` turns were dropped; `longest` is the model's longest context."""
        many = f"the oldest {dropped} turns are" if dropped > 1 else "the oldest turn is"
        more = "; a larger -c keeps more" if longest > self.context else ""
        return f"the context of {self.context} tokens is full: {many} dropped{more}"


def said_in(result: Answer) -> str:
    """Return an answer's text, or "" if it is only white space. Reasoning is left out if it was told apart."""
    said = result.text if result.said is None else result.said
    return said if said.strip() else ""
