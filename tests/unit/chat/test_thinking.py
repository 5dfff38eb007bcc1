"""`tpi chat --url` with a reasoning model: reasoning is shown as it comes, and is not part of the answer."""

import pytest

from master.chat.client import ChatServer
from master.chat.conversation import Conversation, Turn
from master.chat.remote import ServerChatBackend
from master.chat.talk import said_in
from master.generation.answer import Answer
from master.text.channels import ShownChannels
from master.vocabulary.sampler import Sampling
from tests.support.chat import ScriptedServer, ShownScreen

THOUGHT = "<think>\nOne and one\n</think>\n\n"


def talk_to(server: ChatServer, *turns: Turn) -> tuple[ServerChatBackend, ShownScreen]:
    screen = ShownScreen()
    return ServerChatBackend(server, Sampling(), 8, Conversation(None, list(turns)), screen), screen


def reply(talk: ServerChatBackend, after: int = 1 << 30) -> Answer:
    """Return the answer; the user stops it after a number of pieces."""
    count = iter(range(1 << 30))
    return talk.reply("Hello", lambda: next(count) >= after, lambda _: None)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_is_shown_as_it_comes_and_not_sent_back(name: str) -> None:
    server = ScriptedServer({name: "One"}, {name: " and one"}, {"content": "Two", name: ""}, {"content": "."})
    talk, screen = talk_to(server)
    result = reply(talk)
    assert screen.shown == ["<think>\nOne", " and one", "\n</think>\n\nTwo", ".", "", "\n"]
    assert (result.text, result.count) == (THOUGHT + "Two.", 4)
    assert talk.conversation.turns == [Turn("Hello", "Two.")]
    reply(talk)
    assert [message["content"] for message in server.asked["messages"]] == ["Hello", "Two.", "Hello"]


def test_it_looks_as_it_does_where_the_model_runs_here() -> None:
    channels = ShownChannels()
    here = channels.push(
        "<|channel|>analysis<|message|>One and one<|end|><|start|>assistant<|channel|>final<|message|>"
    )
    here += channels.push("Two.<|return|>") + channels.flush()
    talk, screen = talk_to(ScriptedServer({"reasoning_content": "One and one"}, {"content": "Two."}))
    reply(talk)
    assert "".join(screen.shown) == here + "\n"


@pytest.mark.parametrize(("after", "reason"), [(1, "interrupted"), (1 << 30, "length")])
def test_an_answer_that_ends_while_thinking_leaves_no_turn(after: int, reason: str) -> None:
    server = ScriptedServer({"reasoning_content": "One and one"}, {"reasoning_content": ""}, reason="length")
    talk, screen = talk_to(server, Turn("a", "b"))
    result = reply(talk, after)
    assert "".join(screen.shown) == THOUGHT + "\n"
    assert (result.finish_reason, said_in(result)) == (reason, "")
    assert talk.conversation.turns == [Turn("a", "b")]
    assert talk.regenerate(lambda: False, lambda _: None).said == ""
    assert talk.conversation.turns == [Turn("a", "b")]


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_answer_that_says_nothing_is_no_turn(content: str) -> None:
    talk, _ = talk_to(ScriptedServer({"content": content}))
    reply(talk)
    assert not talk.conversation.turns
