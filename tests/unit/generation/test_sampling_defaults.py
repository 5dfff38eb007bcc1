"""Sampling settings in a model's files are defaults for options that the user leaves out, and never end a run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any, TypeAlias

import click
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGUFWriter

from master.api.answers.requests import GenerationOptions
from master.api.answers.service import _sampler
from master.api.anthropic.form import MessagesForm
from master.api.openai.chat_form import ChatForm
from master.chat.conversation import Conversation
from master.chat.remote import ServerChatBackend
from master.generation.client import Client
from master.generation.defaults import SamplingDefaults
from master.options import sampling_options, take_sampling
from master.vocabulary.sampler import Sampler, Sampling
from tests.support.chat import ScriptedServer, ShownScreen
from tests.support.models import TinyModel
from tests.support.weights.gguf_models import byte_level_vocabulary, write_gguf
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

Models: TypeAlias = Callable[[str], TinyModel]
SAID = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.1, "do_sample": True}
MEANT = Sampling(temperature=0.6, top_k=20, top_p=0.9, min_p=0.0, repeat_penalty=1.1)


def drawn(given: Sampling, said: Any) -> tuple[float, ...]:
    """Return the settings in effect for a model whose files have these settings."""
    used = SamplingDefaults.of({"sampling": said}).under(given)
    return used.temperature, used.top_k, used.top_p, used.min_p, used.repeat_penalty


def typed(*flags: str) -> Sampling:
    """Return the sampling settings that a command reads from `flags`."""
    taken = []

    @click.command()
    @sampling_options
    def command(**given: Any) -> None:
        taken.append(take_sampling(given))

    assert CliRunner().invoke(command, flags).exit_code == 0
    return taken[0]


def values(sampling: Sampling) -> tuple[float, ...]:
    return drawn(sampling, None)


def test_the_models_settings_count_where_none_are_given() -> None:
    assert drawn(typed(), SAID) == values(MEANT)
    assert drawn(typed(), None) == drawn(typed(), {}) == values(Sampling())
    assert drawn(typed("--temp", "0", "--top-k", "3"), SAID)[:3] == (0, 3, 0.9)
    assert drawn(typed("--temp", "0.8"), SAID)[0] == 0.8  # also where it is what holds without a model
    assert drawn(Sampling(), SAID) == values(Sampling())  # all of it was meant


def test_without_sampling_a_model_is_greedy() -> None:
    assert drawn(typed(), SAID | {"do_sample": False})[0] == 0
    assert drawn(typed(), {"do_sample": False})[0] == 0
    assert drawn(typed("--temp", "0.5"), {"do_sample": False})[0] == 0.5


@pytest.mark.parametrize(
    "said",
    [
        *({name: value} for name in [*SAID][:-1] for value in ("x", True, -7, 1e999, float("nan"), 1e40)),
        {"top_k": 0.5}, {"top_p": 0}, {"temperature": [0.6]}, {"suppress_tokens": 3}, {"suppress_tokens": [5, -1]},
    ],
)  # fmt: skip
def test_what_is_not_valid_is_named_and_not_used(said: dict[str, Any]) -> None:
    defaults = SamplingDefaults.of({"sampling": said})
    assert drawn(typed(), said) == values(Sampling())
    (note,) = defaults.ignored
    assert next(iter(said)) in note
    assert len(note) < 120


@pytest.mark.parametrize("said", [[], "greedy", 3, {"do_sample": "no"}, {"temperature": None}])
def test_a_damaged_pack_says_nothing_of_sampling(said: Any) -> None:
    assert SamplingDefaults.of({"sampling": said}) == SamplingDefaults()


def test_a_top_k_of_minus_one_is_all() -> None:
    assert drawn(typed(), {"top_k": -1})[1] == 0


def test_suppressed_tokens_are_never_drawn_whatever_is_given() -> None:
    defaults = SamplingDefaults.of({"sampling": {"suppress_tokens": [0, 2, 1 << 70]}})
    for given in (typed("--temp", "0"), Sampling(temperature=0)):
        assert Sampler(defaults.under(given)).sample(np.array([3, 1, 2, 0], np.float32)) == 1
    likelier = Sampling(temperature=9.0, top_k=0, top_p=1, min_p=0, seed=1, bias={0: 100.0})
    sampler = Sampler(defaults.under(likelier))
    assert {sampler.sample(np.zeros(4, np.float32)) for _ in range(60)} == {1, 3}


def test_it_is_said_for_people_what_is_used() -> None:
    defaults = SamplingDefaults.of({"sampling": SAID})
    assert "temperature 0.6, top k 20, top p 0.9, min p 0, repeat penalty 1.1; --temp" in defaults.words(typed())
    assert "temperature" not in defaults.words(typed("--temp", "1"))
    assert "greedy" in SamplingDefaults.of({"sampling": {"do_sample": False}}).words(typed())
    assert SamplingDefaults().words(typed()) == ""


@pytest.mark.parametrize(("body", "temperature", "top_p"), [({}, 0.6, 0.9), ({"temperature": 0, "top_p": 0.5}, 0, 0.5)])
def test_a_server_fills_in_what_a_request_leaves_out(body: dict[str, Any], temperature: float, top_p: float) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "model": "m", **body}
    defaults = SamplingDefaults.of({"sampling": SAID})
    for form in (ChatForm, MessagesForm):
        wanted: GenerationOptions = form.model_validate(asked).ask(Client()).options
        used = _sampler(None, wanted, 0, defaults).sampling
        assert (used.temperature, used.top_p, used.top_k) == (temperature, top_p, 20)


def test_a_server_is_sent_what_was_given_alone() -> None:
    server = ScriptedServer({"content": "One"})
    talk = ServerChatBackend(server, typed("--temp", "0"), 8, Conversation(), ShownScreen())
    talk.reply("Hello", lambda: False, lambda _: None)
    assert server.asked["temperature"] == 0
    assert not {"top_k", "top_p", "min_p", "repeat_penalty"} & server.asked.keys()


def packed(source: Path, target: Path) -> Any:
    pack_model(open_source(source), "f32", target)
    return Pack.open(target).tokenizer_info.get("sampling")


def test_a_pack_has_what_a_directory_says(tiny_model: Models, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    copytree(tiny_model("llama").directory, directory)
    said: dict[str, Any] = {
        **SAID,
        "top_p": float("inf"),
        "max_new_tokens": 7,
        "min_p": None,
        "temperature": ["x"],
        "eos_token_id": 2,
    }
    said |= {"suppress_tokens": [5, 9]}
    (directory / "generation_config.json").write_text(json.dumps(said).replace("Infinity", "1e999"))
    assert packed(directory, tmp_path / "pack") == {
        "do_sample": True, "temperature": "['x']", "top_k": 20, "top_p": "inf", "repetition_penalty": 1.1,
        "suppress_tokens": [5, 9],
    }  # fmt: skip


@pytest.mark.parametrize("keys", [("temp", "top_p", "penalty_repeat"), ()])
def test_a_pack_has_what_a_gguf_file_says(keys: Sequence[str], tiny_model: Models, tmp_path: Path) -> None:
    model = tiny_model("llama")
    vocabulary = byte_level_vocabulary(model.directory)

    def described(writer: GGUFWriter) -> None:
        vocabulary(writer)
        for key in keys:
            writer.add_float32(f"general.sampling.{key}", 0.5)
        if keys:
            writer.add_int32("general.sampling.top_k", 20)
            writer.add_array("tokenizer.ggml.suppress_tokens", [5, 9])

    write_gguf(tmp_path / "m.gguf", model, "llama", vocabulary=described)
    said = {"temperature": 0.5, "top_p": 0.5, "repetition_penalty": 0.5, "top_k": 20, "suppress_tokens": [5, 9]}
    assert packed(tmp_path / "m.gguf", tmp_path / "pack") == (said if keys else None)
