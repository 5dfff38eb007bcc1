"""Recommended models: their families exist, their sizes are the published ones, and the table is easy to read."""

from dataclasses import replace
from pathlib import Path

import pytest

from master.models.forecasts import ModelForecast, house
from master.models.recommended import Recommended, recommended
from master.models.table import print_models
from master.planning.home.members import described_home
from master.planning.shapes import shape_of_config, weight_bytes
from tpi.keys.policy import KeyPolicy
from tpi.pack.library.hubfiles import HubModel

HOME = described_home("8GiB,4GiB", "1 Gbit, 0.5 ms")


@pytest.mark.parametrize("model", recommended(), ids=lambda model: model.name)
def test_a_recommended_model_has_a_known_family_and_its_published_size(model: Recommended) -> None:
    assert HubModel.parse(model.name)
    assert len(model.name) <= 41
    assert len(model.good) <= 19
    shape = shape_of_config(model.name, model.config, "f32")
    assert weight_bytes(shape) / 4e9 == pytest.approx(model.parameters, rel=0.01)
    assert shape.config.context >= 4096


def test_the_table_says_what_runs_how_fast_and_from_where(capsys: pytest.CaptureFixture[str]) -> None:
    models = {model.name: model for model in recommended()}
    small, middle = models["Qwen/Qwen3-4B-GGUF"], models["microsoft/phi-4-gguf"]
    tiny = described_home("600MiB", "1 Gbit, 0.5 ms")
    found = [ModelForecast.of(small, HOME), ModelForecast.of(middle, HOME), ModelForecast.of(middle, tiny)]
    assert [each.rate is None for each in found] == [False, False, True]
    assert [each.from_disk for each in found] == [False, True, False]
    print_models(found, HOME)
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "for this machine and device-1, with 11.6 GB of free memory together"
    assert [line.split()[3] for line in lines[3:6]] == [small.name, middle.name, middle.name]
    assert (lines[4].split()[2][-1], lines[5].split()[2]) == ("*", "-")
    assert "* part of the weights is read from disk" in said
    assert "- the memory is too small" in said


def test_the_longest_names_and_words_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    small = Recommended("o" * 41, 1.0, "g" * 19, {}, "q4")
    print_models(
        [ModelForecast(small, 10**11, 123.4, 1, True)], replace(HOME, names=("master",), machines=HOME.machines[:1])
    )
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_without_paired_machines_it_is_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPI_WORKERS", raising=False)
    assert house(tmp_path, KeyPolicy(tmp_path / "keys")).names == ("master",)
