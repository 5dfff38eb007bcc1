"""`/continue` in `tpi chat --url`: the server gets a request for the rest of the answer that was cut."""

import pytest

from master.chat.conversation import Conversation, Turn
from master.chat.remote import ServerChatBackend
from master.generation.answer import Answer
from master.vocabulary.sampler import Sampling
from tests.support.chat import ScriptedServer, ShownScreen
from tpi.errors import UsageError


def talk_with(server: ScriptedServer, *turns: Turn) -> ServerChatBackend:
    return ServerChatBackend(server, Sampling(), 8, Conversation(None, list(turns)), ShownScreen())


def go_on(talk: ServerChatBackend) -> Answer:
    return talk.go_on(lambda: False, lambda _: None)


def test_the_server_gets_what_there_is_of_the_answer() -> None:
    server = ScriptedServer({"content": " and two"}, {"content": "."})
    talk = talk_with(server, Turn("a", "b", ended=True), Turn("Count", "One"))
    assert go_on(talk).text == "One and two."
    assert talk.conversation.turns == [Turn("a", "b"), Turn("Count", "One and two.")]
    assert server.asked["messages"][-2:] == [
        {"role": "user", "content": "Count"},
        {"role": "assistant", "content": "One"},
    ]
    assert (server.asked["continue_final_message"], server.asked["add_generation_prompt"]) == (True, False)
    with pytest.raises(UsageError, match="the last answer is complete"):
        go_on(talk)


def test_thoughts_that_were_cut_are_not_continued_by_a_server() -> None:
    talk = talk_with(ScriptedServer({"reasoning_content": "Hm"}, reason="length"))
    talk.reply("Hello", lambda: False, lambda _: None)
    with pytest.raises(UsageError, match="cut during its reasoning"):
        go_on(talk)
    assert talk.conversation.turns == []


def test_an_answer_stopped_before_it_began_begins_again() -> None:
    server = ScriptedServer({"content": "One"})
    talk = talk_with(server, Turn("a", "b", ended=True))
    talk.reply("Count", lambda: True, lambda _: None)
    assert talk.conversation.turns == [Turn("a", "b")]
    go_on(talk)
    assert talk.conversation.turns == [Turn("a", "b"), Turn("Count", "One")]
    assert server.asked["messages"][-1] == {"role": "user", "content": "Count"}


def test_a_cut_answer_stays_where_the_server_is_lost() -> None:
    class Lost(ScriptedServer):
        def events(self, *_: object) -> None:  # type: ignore[override]
            raise UsageError("refused")

    talk = talk_with(Lost(), Turn("Count", "One"))
    with pytest.raises(UsageError, match="refused"):
        go_on(talk)
    assert talk.conversation.unfinished == Turn("Count", "One")
