"""Families that differ from others in few settings: published files, and variants refused by name."""

from typing import Any

import pytest

from tests.support.models import SIZES
from tpi.config import Mixture
from tpi.errors import ModelError
from tpi.families.base import Model
from tpi.families.huggingface.reader import from_huggingface

HYBRID: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["attention"] * 2, "num_local_experts": 0,
    "position_embedding_type": "rope",
}  # fmt: skip


def model_of(**fields: Any) -> Model:
    return from_huggingface({**SIZES, **fields}, lambda name: "lm_head" not in name, "somewhere")


def test_glm_rotates_half_of_a_head_unless_it_says_otherwise() -> None:
    glm: dict[str, Any] = {"architectures": ["Glm4MoeForCausalLM"], "num_attention_heads": 6, "head_dim": 16}
    assert len(model_of(**glm).config.inv_freq) == 4
    assert len(model_of(**glm, partial_rotary_factor=1.0).config.inv_freq) == 8
    assert "model.layers.2.*" in model_of(**glm, num_nextn_predict_layers=1).ignored_tensors


def test_yarn_applies_to_the_part_of_a_head_that_rotates() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    glm = {"architectures": ["Glm4MoeForCausalLM"], "head_dim": 16, "rope_parameters": scaling}
    found = model_of(**glm).config
    assert (len(found.inv_freq), found.long_inv_freq) == (4, ())
    assert found.rope_scale > 1


def test_minimax_rotates_as_many_values_as_it_says() -> None:
    found = model_of(architectures=["MiniMaxM2ForCausalLM"], head_dim=16, rotary_dim=8, attn_type_list=[1, 1])
    assert (len(found.config.inv_freq), found.config.whole_norms, found.notes) == (4, True, ())


def test_ministral_grows_its_queries_beyond_its_original_context() -> None:
    text = {**SIZES, "model_type": "ministral3"}
    found = model_of(architectures=["Mistral3ForConditionalGeneration"], text_config=text).config
    assert (found.family, found.query_growth, found.original_context) == ("ministral3", 0.1, 16384)


def test_granite_4_without_experts_is_dense() -> None:
    found = model_of(**HYBRID, shared_intermediate_size=64).config
    assert (found.mixture, found.intermediate, len(found.inv_freq)) == (None, 64, 8)
    assert model_of(**HYBRID | {"position_embedding_type": "nope"}).config.inv_freq == ()


def test_hunyuan_stretches_its_rotary_base() -> None:
    scaling = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "type": "dynamic"}
    found = model_of(architectures=["HunYuanDenseV1ForCausalLM"], head_dim=128, rope_scaling=scaling)
    assert found.config.inv_freq[1] == pytest.approx((10000.0 * 1000.0 ** (128 / 126)) ** (-1 / 64))
    assert (found.config.late_head_norms, found.notes) == (True, ())


def test_hunyuan_may_give_its_experts_layer_by_layer() -> None:
    found = model_of(architectures=["HunYuanMoEV1ForCausalLM"], num_experts=4, moe_topk=[2, 2])
    assert found.config.mixture == Mixture(
        4, 2, SIZES["intermediate_size"], SIZES["intermediate_size"], normalised=True
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (HYBRID | {"layer_types": ["attention"]}, "layer_types has 1 entries for 2 layers"),
        (HYBRID | {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ({"architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1, 0]}, "attn_type_list"),
        ({"architectures": ["MiniMaxM2ForCausalLM"], "use_qk_norm": False}, "use_qk_norm is 'False'"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "use_bias": True}, "biases of shared experts"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_norm_min": 0.5}, "moe_norm_min is 0.5"),
        ({"architectures": ["Qwen4ExpForConditionalGeneration"]}, "hyper-connections, .* use Qwen 3.5"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "compressed sparse attention, .* use Qwen 3.5"),
        ({"architectures": ["Inkling2LoopForCausalLM"]}, "layers used in loops; use Gemma 3"),
        (
            {"architectures": ["Ministral3ForCausalLM"], "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "llama_4",
        ),
        ({"architectures": ["HunYuanMoEV1ForCausalLM"], "moe_topk": [1, 2]}, "moe_topk is .1, 2.: layers with"),
        (
            {"architectures": ["HunYuanDenseV1ForCausalLM"], "rope_scaling": {"type": "dynamic", "alpha": -1.0}},
            "alpha of rope_scaling is -1.0",
        ),
        ({"architectures": ["ArceeForCausalLM"], "hidden_act": "tanh"}, "'tanh' is not supported"),
    ],
)
def test_unsupported_variants_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model_of(**fields)
