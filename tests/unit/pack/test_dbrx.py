"""The configuration of DBRX, whose fields are inside objects: which of two fields with one meaning counts."""

from typing import Any

import numpy as np
import pytest

from tpi.errors import ModelError
from tpi.families.base import Model
from tpi.families.huggingface.reader import from_huggingface

# As published (databricks/dbrx-base), smaller: the base of its rotary embedding stands in `attn_config` alone.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 64, "n_heads": 4, "n_layers": 2,
    "max_seq_len": 256, "vocab_size": 320, "tie_word_embeddings": False, "resid_pdrop": 0.0, "emb_pdrop": 0.0,
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "model_type": "", "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 40, "model_type": "", "moe_jitter_eps": 0, "moe_loss_weight": 0.05,
                   "moe_num_experts": 4, "moe_top_k": 2},
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0}


def model_of(theta: float | None, **fields: Any) -> Model:
    """Return a model with this rotary base in `attn_config`, and further fields outside."""
    attention = PUBLISHED["attn_config"] | {"rope_theta": theta}
    return from_huggingface(PUBLISHED | {"attn_config": attention} | fields, lambda name: True, "it")


def base_of(model: Model) -> float:
    """Return the rotary base of the model's frequencies, for heads of 16 values."""
    first, second = model.config.inv_freq[:2]
    return float(np.round((first / second) ** 8))


def test_the_published_configuration_has_its_trained_base() -> None:
    assert base_of(from_huggingface(PUBLISHED, lambda name: True, "it")) == 500000


@pytest.mark.parametrize(
    ("theta", "fields", "base"),
    [
        (100, {}, 100),
        (100, {"rope_theta": 100.0}, 100),
        (100, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, 100),
        (100, {"rope_parameters": LINEAR}, 100),
        (100, {"rope_scaling": LINEAR}, 100),
        (100, {"rope_theta": 7.0, "rope_parameters": LINEAR | {"rope_theta": 100}}, 100),
        (None, {"rope_theta": 1000}, 1000),
        (None, {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}, 1000),
        (None, {}, 10000),
    ],
)
def test_a_base_that_stands_in_one_place_counts(theta: float | None, fields: dict[str, Any], base: float) -> None:
    assert base_of(model_of(theta, **fields)) == base


@pytest.mark.parametrize(
    ("theta", "fields", "other"),
    [
        (10000, {"rope_theta": 100}, "rope_theta is 100"),
        (100, {"rope_theta": 1000}, "rope_theta is 1000"),
        (500000, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, "rope_theta is 10000.0"),
        (100, {"rope_theta": 100, "rope_scaling": LINEAR | {"rope_theta": 7.0}}, "rope_theta is 7.0"),
    ],
)
def test_bases_that_contradict_each_other_are_refused(theta: float, fields: dict[str, Any], other: str) -> None:
    with pytest.raises(ModelError, match=rf"attn_config.rope_theta is {theta}, but {other}"):
        model_of(theta, **fields)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_scaling_inside_attn_config_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"attn_config.{name}"):
        model_of(100, attn_config=PUBLISHED["attn_config"] | {name: LINEAR})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 32, but d_model, which means the same, is 64"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, but n_layers, which means the same, is 2"),
        ({"attn_config": [500000]}, "attn_config is not an object"),
        ({"ffn_config": "silu"}, "ffn_config is not an object"),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_huggingface(PUBLISHED | fields, lambda name: True, "it")


def test_fields_beside_their_objects_do_not_count_and_are_named() -> None:
    """Transformers does not use such fields, either."""
    stray = {"clip_qkv": 0.5, "num_key_value_heads": 1, "hidden_act": "relu", "num_experts_per_tok": 1}
    plain, model = from_huggingface(PUBLISHED, lambda name: True, "it"), model_of(500000, **stray)
    assert model.config == plain.config
    assert plain.notes == ()
    assert [name for name in stray if f"{name} outside its object" in model.notes[0]] == list(stray)
