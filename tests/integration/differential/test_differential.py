"""Random config.json files: TPI computes what transformers computes, or refuses. Missing fields have its defaults."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.differential import differential, nested_draws
from tests.support.differential.differential import ARCHITECTURES, OTHER_SPELLINGS, Tally, class_fields
from tests.support.differential.nested_draws import NESTED
from tests.support.differential.stand_ins import STAND_INS
from tests.support.weights.split import F32
from tpi.families.huggingface import dbrx, expertdefaults
from tpi.families.huggingface.defaults import HARMLESS, REFUSED
from tpi.families.table import FAMILIES

DRAWS, FURTHER_DRAWS = 20, 26  # of each architecture; the latter only where few others have some field
SEEN = 20  # runs in which each field is elsewhere than it usually stands


@pytest.mark.timeout(1200)  # a minute or two, where nothing else runs
def test_random_configurations_give_equal_logits_or_a_refusal(tmp_path: Path) -> None:
    draws = {name: DRAWS + FURTHER_DRAWS * differential.has_rare_fields(name) for name in ARCHITECTURES}
    tally = differential.run(draws, tmp_path)
    fields = {name for architecture in ARCHITECTURES for name in class_fields(architecture)} | nested_draws.INSIDE
    fields.remove("hidden_size_per_layer_input")  # all values are refused but 0, where it usually stands
    assert {name for family in FAMILIES for name in family.architectures} == {*ARCHITECTURES, *OTHER_SPELLINGS}
    assert not tally.wrong, str(tally)
    assert sum(draws.values()) >= 1000
    assert sum(tally.ran.values()) >= 0.6 * sum(draws.values()), str(tally)
    assert all(tally.ran[name] >= number / 2 for name, number in draws.items()), str(tally)
    assert all(tally.varied[name] >= SEEN for name in fields), str(tally)


def test_a_disagreement_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = differential._answer

    def off(*given: Any) -> F32:
        logits = answer(*given)
        logits[-1, 3] += np.float32(1e-3) * np.abs(logits).max()
        return logits

    monkeypatch.setattr(differential, "_answer", off)
    tally = Tally()
    for seed in range(4):
        differential.compare(differential.draw("LlamaForCausalLM", seed), tmp_path / str(seed), tally)
    assert sum(tally.ran.values()) == len(tally.wrong) > 0


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in (*NESTED, *STAND_INS)])
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    family = next(family for family in FAMILIES if architecture in family.architectures)
    theirs = class_fields(architecture)
    for name, default in theirs.items():
        assert name in family.defaults or name in HARMLESS or name in REFUSED, f"{name} is not read"
        if name in family.defaults:
            assert family.defaults[name] == default, name


def test_defaults_of_dbrx_are_those_of_transformers() -> None:
    """The fields of DBRX are inside objects, and get the names that other families use."""
    from transformers import DbrxConfig

    config = DbrxConfig()
    fields = {name: getattr(config, name) for name in ("d_model", "n_heads", "n_layers", "max_seq_len", "vocab_size")}
    parts = {part: vars(getattr(config, part)) for part in ("attn_config", "ffn_config")}
    theirs, ours = dbrx.flat(fields | parts), expertdefaults.DBRX
    shared = ours.keys() & theirs.keys()
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    assert ours["rope_theta"] == config.rope_parameters["rope_theta"]
    assert {"hidden_size", "num_key_value_heads", "clip_qkv", "num_experts", "intermediate_size"} <= shared


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("LlamaForCausalLM", "rope_theta"),
        ("SmolLM3ForCausalLM", "rope_theta"),
        ("Gemma3ForCausalLM", "rope_theta"),
        ("Gemma3ForCausalLM", "rope_local_base_freq"),
    ],
)
def test_rotary_bases_are_those_of_transformers(architecture: str, name: str) -> None:
    family = next(family for family in FAMILIES if architecture in family.architectures)
    found = differential.config_class(architecture)().rope_parameters
    if architecture == "Gemma3ForCausalLM":
        found = found["full_attention" if name == "rope_theta" else "sliding_attention"]
    assert family.defaults[name] == found["rope_theta"]
