"""One conversation with a model, wherever it runs: text in, an answer out."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from master.chat.conversation import Conversation, Turn
from master.chat.showing.screen import Screen
from master.generation.answer import Answer
from tpi.errors import UsageError


class Talk(ABC):
    """A conversation; `context` is in tokens, `used` of it are taken.

    `lasting`: it can go on after a NodeError, since nothing of it is where the model runs.
    """

    used = 0
    lasting = False

    def __init__(self, conversation: Conversation, context: int, screen: Screen) -> None:
        """Answers are shown on `screen`."""
        self.conversation = conversation
        self.context = context
        self.screen = screen

    @abstractmethod
    def check_system(self, system: str | None) -> None:
        """Raises ModelError if the model's chat template takes no such system message, UsageError if it is too long."""

    @abstractmethod
    def _answer(
        self, text: str, begun: Turn | None, stopped: Callable[[], bool], warn: Callable[[str], None]
    ) -> Answer:
        """Answer `text` on the screen, or go on with the answer of `begun`, whose `user` is `text`.

        The result's text begins with that of `begun`, its `token_ids` do not. Errors as `reply`.
        """

    def reply(self, text: str, stopped: Callable[[], bool], warn: Callable[[str], None]) -> Answer:
        """Answer `text`, streaming to the screen; `warn` is told if turns had to be dropped.

        Only what was said is kept: an answer that breaks off before its first letter, while the model is thinking for
        example, leaves the turns as they were.

        Raises:
            UsageError: if the text is too long, or the chat template refuses it.
            NodeError: if a worker is lost, or the server.
        """
        result = self._answer(text, None, stopped, warn)
        self.keep(text, result, None)
        return result

    def go_on(self, stopped: Callable[[], bool], warn: Callable[[str], None]) -> Answer:
        """Continue the last answer where it was cut, in the same turn; if that fails, it stays as it was.

        Raises:
            UsageError: as `reply`, and if there is no answer, or it came to its own end.
            NodeError: as `reply`.
        """
        turns, unsaid, dropped = self.conversation.turns, self.conversation.unsaid, self.conversation.dropped
        begun = self.conversation.unfinished
        if begun is None:
            reason = "the last answer came to its own end" if turns else "there is no answer yet"
            raise UsageError(f"{reason}: there is nothing to continue; say something")
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
        """Another answer instead of the last one, which stays if the new one says nothing.

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
                self.conversation.unsaid = None

    def keep(self, text: str, result: Answer, begun: Turn | None) -> None:
        """Remember `text` and what it was answered; an answer that says nothing can only be continued."""
        said, ended = said_in(result), result.finish_reason == "stop"
        tokens = (*(begun.tokens if begun else ()), *result.token_ids)
        turn = Turn(text, said, self.used, tokens, result.text, ended)
        self.conversation.unsaid = None if said or ended else turn
        if said:
            self.conversation.turns.append(turn)

    def full(self, dropped: int, longest: int) -> str:
        """What is said when the oldest `dropped` turns had to go; `longest` is what the model was made for."""
        many = f"the oldest {dropped} turns are" if dropped > 1 else "the oldest turn is"
        more = "; a larger -c keeps more" if longest > self.context else ""
        return f"the context of {self.context} tokens is full: {many} dropped{more}"


def said_in(result: Answer) -> str:
    """What an answer says, without thinking where that is known apart; empty if that is white space alone."""
    said = result.text if result.said is None else result.said
    return said if said.strip() else ""
