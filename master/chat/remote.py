"""A conversation with a model on a server (`master.chat.client`)."""

from collections.abc import Callable
from contextlib import closing
from time import perf_counter
from typing import Any

from master.chat.client import ChatServer, ServerRefusedError
from master.chat.conversation import Conversation, Turn
from master.chat.showing.screen import Screen
from master.chat.talk import ChatBackend, said_in
from master.generation.answer import Answer, FinishReason
from master.text.thoughts import ShownThoughts
from master.vocabulary.sampler import Sampling
from tpi.errors import NodeError, UsageError

_TOO_LONG = "context_length_exceeded"
_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


class ServerChatBackend(ChatBackend):
    """A conversation with a server. Each request has all turns; the server's prefix cache has earlier ones."""

    lasting = True

    def __init__(
        self, server: ChatServer, sampling: Sampling, tokens: int | None, conversation: Conversation, screen: Screen
    ) -> None:
        """Create a conversation; an answer has at most `tokens` tokens (None: the server's limit).

        Raises:
            NodeLost: if the server cannot be reached.
        """
        self.model, context = server.model()
        super().__init__(conversation, context, screen)
        self._server = server
        settings = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
        given = settings if sampling.given is None else [name for name in settings if name in sampling.given]
        self._fields: dict[str, Any] = {
            "model": self.model, "seed": sampling.seed, "stream_options": {"include_usage": True},
            **{name: getattr(sampling, name) for name in given},
        }  # fmt: skip
        if tokens is not None:
            self._fields["max_tokens"] = tokens

    def check_system(self, system: str | None) -> None:
        """Do nothing, because the server checks the system message with each request."""

    def _answer(
        self, text: str, begun: Turn | None, stopped: Callable[[], bool], warn: Callable[[str], None]
    ) -> Answer:
        """Ask the server for an answer, or to continue the answer of `begun`.

        While the server refuses the prompt as too long, drop the oldest turn and ask again.
        """
        if begun is not None and not begun.assistant:
            if begun.shown:
                raise UsageError("the answer was cut during its reasoning, which a server cannot continue; ask again")
            begun = None  # there is no text to continue: begin a new answer
        before = self.conversation.dropped
        while True:
            try:
                result = self._streamed(text, begun, stopped)
                break
            except ServerRefusedError as error:
                if error.code != _TOO_LONG or self.conversation.dropped >= len(self.conversation.turns):
                    self.conversation.dropped = before
                    raise
                self.conversation.dropped += 1
        if dropped := self.conversation.dropped - before:
            warn(self.full(dropped, self.context))
        return result

    def _streamed(self, text: str, begun: Turn | None, stopped: Callable[[], bool]) -> Answer:
        """Ask the server once and return its answer; if the connection is lost meanwhile, return the text so far."""
        messages, fields = self.conversation.messages(text, self.conversation.dropped), dict(self._fields)
        result, thoughts = Answer(0, finish_reason="interrupted", said=""), ShownThoughts()
        if begun is not None:
            messages.append({"role": "assistant", "content": begun.assistant})
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
            result.text = begun.shown or begun.assistant
            thoughts.said = begun.assistant
            self.screen.resume(result.text)
        shown = len(result.text)
        asked_at, first = perf_counter(), 0.0
        try:
            with closing(self._server.events(fields | {"messages": messages}, stopped)) as chunks:
                for chunk in chunks:
                    with self._server.understood():
                        piece = self._taken(chunk, result, thoughts)
                    result.text += piece
                    self.screen.write(piece)
                    now = perf_counter()
                    first = first or (now if len(result.text) > shown else 0.0)
                    result.ttft, result.decode_seconds = (first or now) - asked_at, now - (first or now)
        except NodeError:
            result.said = thoughts.said
            if said_in(result):
                self.keep(text, result, begun)
            raise
        finally:
            result.said = thoughts.said
            if not result.prompt_tokens:
                self.used = min(self.context, self.conversation.used + result.counted)
            if len(result.text) > shown:
                result.text += (rest := thoughts.flush())
                self.screen.write(rest + "\n")
            self.screen.end()
        return result

    def _taken(self, chunk: dict[str, Any], result: Answer, thoughts: ShownThoughts) -> str:
        """Add one chunk of the stream to `result`, and return the text to show for it."""
        shown = ""
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta", {})
            piece = thoughts.think(_thought(delta)) + thoughts.say(delta.get("content") or "")
            shown += piece
            result.counted += bool(
                piece
            )  # about one token each; the server's own count comes only at the end of a complete answer
            if (reason := choice.get("finish_reason")) is not None:
                result.finish_reason = _REASONS.get(reason, "stop")
        if usage := chunk.get("usage"):
            result.prompt_tokens, result.counted = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
            self.used = result.prompt_tokens + result.counted
        return shown


def _thought(delta: dict[str, Any]) -> str:
    """Return a chunk's reasoning from either of the two fields that servers use."""
    text = delta.get("reasoning_content") or delta.get("reasoning")
    return text if isinstance(text, str) else ""
