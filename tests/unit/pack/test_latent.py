"""Models whose keys and values come from a latent vector, in packs: their settings, and the order of their heads."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from tests.support.models import LATENT, SIZES, TOKENS, TinyModel, forward, make_model
from tests.support.weights import gguf_experts
from tests.support.weights.gguf_experts import tensors, write_experts
from tests.support.weights.gguf_models import decoded
from tests.support.weights.packs import part
from tpi.config import ModelConfig
from tpi.errors import ModelError
from tpi.families.huggingface.configonly import from_config
from tpi.families.huggingface.reader import from_huggingface
from tpi.families.latent.ggufsettings import gguf_settings
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.builder.claims import check_all_tensors_used
from tpi.pack.builder.plan import plan_pack
from tpi.pack.manifest import Manifest
from tpi.pack.reader import Pack

Models = Callable[[str], TinyModel]
V2: dict[str, Any] = {
    **SIZES, "architectures": ["DeepseekV2ForCausalLM"], "num_key_value_heads": 6, "q_lora_rank": None,
    "kv_lora_rank": 64, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 100,
}  # fmt: skip
V3: dict[str, Any] = V2 | {"architectures": ["DeepseekV3ForCausalLM"], "n_group": 4, "topk_group": 2}
GLM: dict[str, Any] = {name: value for name, value in V2.items() if name != "first_k_dense_replace"} | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "q_lora_rank": 32,
}
YARN = {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}


def config_of(**fields: Any) -> ModelConfig:
    return from_huggingface(fields, lambda name: True, "test").config


def test_scores_are_sharpened_as_yarn_says() -> None:
    plain, sharpened = config_of(**V2), config_of(**V2, rope_scaling=YARN)
    assert plain.attention_scale == 32**-0.5
    assert sharpened.attention_scale == pytest.approx(32**-0.5 * (0.1 * 0.707 * np.log(40) + 1) ** 2)
    assert (sharpened.rope_scale, sharpened.head_dim, sharpened.kv_width) == (1.0, 32, 24)
    assert sharpened.attention_scale == config_of(**V2, rope_parameters=YARN).attention_scale


def test_how_experts_are_chosen() -> None:
    greedy = config_of(**V2, n_group=4, topk_group=2, routed_scaling_factor=16.0).mixture
    grouped = config_of(**V2, n_group=4, topk_group=2, topk_method="group_limited_greedy").mixture
    sigmoid = config_of(**V3, norm_topk_prob=False).mixture
    assert greedy is not None
    assert grouped is not None
    assert sigmoid is not None
    assert (greedy.scores, greedy.normalised, greedy.scale, greedy.groups) == ("softmax", False, 16.0, 1)
    assert (grouped.groups, grouped.groups_used, grouped.group_best) == (4, 2, 1)
    assert (sigmoid.scores, sigmoid.normalised, sigmoid.scale, sigmoid.group_best) == ("sigmoid", False, 2.5, 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (V2 | {"q_lora_rank": 0}, "q_lora_rank is 0 in the model's configuration; a number from 1"),
        (GLM | {"first_k_dense_replace": 2}, "first_k_dense_replace is 2; 1 is supported"),
        (GLM | {"mlp_layer_types": ["dense"]}, "mlp_layer_types is .'dense'.; dense or sparse for each of 2 layers"),
        (GLM | {"mlp_layer_types": ["dense", "other"]}, "mlp_layer_types is .'dense', 'other'."),
        (V2 | {"num_key_value_heads": 2}, "num_key_value_heads is 2; it must be 6"),
        (V2 | {"v_head_dim": 40}, "v_head_dim is 40"),
        (V2 | {"qk_rope_head_dim": 7}, "7"),
        (V2 | {"norm_topk_prob": True}, "norm_topk_prob is true"),
        (V2 | {"mlp_bias": True}, "mlp_bias is true"),
        (V2 | {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; greedy and group_limited"),
        (V2 | {"topk_method": "group_limited_greedy"}, "n_group is None"),
        (V2 | {"moe_layer_freq": 2}, "moe_layer_freq is 2; 1 is supported"),
        (V2 | {"scoring_func": "sigmoid"}, "scoring_func is sigmoid; softmax is"),
        (V2 | {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        (V2 | {"n_shared_experts": 0}, "n_shared_experts is 0"),
        (
            V2 | {"rope_scaling": YARN | {"rope_type": "linear"}},
            "mscale_all_dim is 0.707 with the rope scaling 'linear'",
        ),
        (V2 | {"num_experts": 6}, "n_routed_experts is 8, but num_experts, which means the same, is 6"),
        (V3 | {"topk_method": "greedy"}, "topk_method is greedy; noaux_tc is"),
        (V3 | {"n_group": 3}, "cannot be chosen by their groups"),
        (V3 | {"num_nextn_predict_layers": "x"}, "num_mtp_layers is 'x'"),
    ],
)
def test_variants_that_cannot_be_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        config_of(**fields)


def test_text_part_of_kimi_is_read() -> None:
    """Kimi K2.5's text model has the layers of DeepSeek-V3, under another prefix."""
    fields = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": V3 | {"model_type": "kimi_k2"}}
    model = from_huggingface(fields, lambda name: name.startswith("language_model.model."), "test")
    assert (model.config.family, model.embedding.tensor) == ("deepseek3", "language_model.model.embed_tokens.weight")
    assert "mm_projector.*" in model.ignored_tensors
    assert any("images are not supported" in note for note in model.notes)


def test_query_latent_is_a_run_of_its_own() -> None:
    """From a config.json alone, as `tpi plan` reads it: 4 layers of DeepSeek-R1's shape."""
    fields = {
        "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3, "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "num_attention_heads": 128, "num_hidden_layers": 4, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rope_scaling": YARN | {"type": "yarn", "original_max_position_embeddings": 4096}, "rope_theta": 10000,
        "v_head_dim": 128, "vocab_size": 129280,
    }  # fmt: skip
    model, source = from_config(fields, "test")
    (attention, dense), *_, (_, experts) = plan_pack(model, source, "q4").layers
    runs = {run.layout.name: run.layout for run in attention.runs}
    assert list(runs) == ["latent", "query_latent", "query_up", "query", "kv"]
    assert [run.units * run.width for run in runs.values()] == [576, 1536, 24576, 24576, 16384]
    assert [run.hidden for run in runs.values()] == [7168, 7168, 1536, 7168, 512]
    formats = {part.name: part.format for run in runs.values() for part in run.parts}
    assert formats == {"latent": "q8", "q_latent": "q8", "q": "q4", "o": "q4", "k": "q8", "v": "q8"}
    assert (dense.kind, experts.kind) == ("ffn", "experts")
    assert experts.runs[-1].layout.units == 256 * 2048 // 32


def test_layers_that_guess_ahead_are_left_out_of_gguf(
    tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def described(writer: GGUFWriter, family: str, config: Any) -> None:
        describe(writer, family, config)
        writer.add_nextn_predict_layers(1)

    describe = gguf_experts._describe
    monkeypatch.setattr(gguf_experts, "_describe", described)
    write_experts(tmp_path / "m.gguf", tiny_model("glm4moelite"), "glm4moelite")
    opened = open_source(tmp_path / "m.gguf")
    assert opened.model.config.layers == 1
    check_all_tensors_used(opened.model, opened.source)
    opened.source.close()


@pytest.mark.parametrize(
    ("vocab", "gating", "scores"), [(154880, 0, "sigmoid"), (154880, 1, "softmax"), (9, 0, "softmax")]
)
def test_scores_of_early_glm_files_are_a_sigmoid(vocab: int, gating: int, scores: str) -> None:
    fields = {
        "block_count": 47, "vocab_size": vocab, "expert_gating_func": gating, "attention.head_count": 4,
        "attention.head_count_kv": 1, "attention.kv_lora_rank": 64, "rope.dimension_count": 8,
        "attention.key_length": 72, "attention.value_length": 64, "attention.key_length_mla": 32,
        "attention.value_length_mla": 32, "attention.layer_norm_rms_epsilon": 1e-5, "attention.q_lora_rank": 32,
        "expert_feed_forward_length": 32, "expert_shared_count": 1, "expert_count": 4, "expert_used_count": 2,
    }  # fmt: skip
    assert gguf_settings(fields)["mixture"].scores == scores


def test_layers_that_guess_ahead_are_left_out() -> None:
    model = from_huggingface(V3 | {"num_nextn_predict_layers": 1}, lambda name: name.startswith("model."), "test")
    assert "model.layers.2.*" in model.ignored_tensors
    assert "model.layers.3.*" not in model.ignored_tensors


def test_a_damaged_latent_is_seen(tiny_model: Models, tmp_path: Path) -> None:
    pack_model(open_source(tiny_model("deepseek2").directory), "f32", tmp_path / "pack")
    path = tmp_path / "pack" / "manifest.json"
    text = path.read_text()
    for damaged in (text.replace('"rank": 64', '"rank": 32'), text.replace('"rope": 8', '"rope": 0')):
        path.write_text(damaged)
        with pytest.raises(ModelError, match="cannot be used"):
            Manifest.load(path)


@pytest.mark.parametrize("family", ["deepseek2", "deepseek3"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q6_K"])
def test_quantised_heads_in_gguf(family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are in one tensor, or in two, one of them transposed.

    Columns of o are whole groups, or floats if a group is larger than a head's value.
    """
    for name, value in {"kv_lora_rank": 256, "v_head_dim": 64, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32,
                        "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}.items():  # fmt: skip
        monkeypatch.setitem(LATENT, name, value)
    monkeypatch.setattr("tests.support.models.LATENT_OF_QUERIES", 256)
    model = make_model(family, tmp_path)
    coded = ("attn_q.", "attn_q_b.", "attn_kv_a_mqa.", "attn_kv_b.", "attn_output.")
    write_experts(tmp_path / "m.gguf", model, family, lambda name: kind if any(one in name for one in coded) else "F32")
    pack_model(open_source(tmp_path / "m.gguf"), "f32", tmp_path / "pack")
    block, stored = Pack.open(tmp_path / "pack").layers[1][0], tensors(model, family)

    def tensor(name: str) -> np.ndarray:
        return np.asarray(decoded(np.ascontiguousarray(stored[f"blk.1.{name}.weight"]), kind)).reshape(-1, 256)

    whole = family == "deepseek2"
    q = tensor("attn_q" if whole else "attn_q_b").reshape(4, 128, 256)
    turned = np.concatenate([q[:, 96::2], q[:, 97::2], q[:, :96]], axis=1)
    np.testing.assert_array_equal(part(block, "query" if whole else "query_up", "q"), turned.reshape(-1, 256))
    o = part(block, "query", "o").reshape(4, 128, 256)
    np.testing.assert_array_equal(o[:, :64].reshape(-1, 256), tensor("attn_output").T)
    assert not o[:, 64:].any()
    values = part(block, "kv", "v").reshape(4, 96, 256)
    expected = tensor("attn_kv_b").reshape(4, 160, 256)[:, 96:] if whole else stored["blk.1.attn_v_b.weight"]
    np.testing.assert_array_equal(values[:, :64], expected)
    latent = tensor("attn_kv_a_mqa")
    expected = np.concatenate([latent[:256], latent[256::2], latent[257::2]])
    np.testing.assert_array_equal(part(block, "latent", "latent"), expected)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.q_lora_rank", 1 << 16, "its latent queries have 65536 values"),
        ("expert_gating_func", 3, "expert_gating_func is 3; softmax and sigmoid"),
        ("rope.scaling.attn_factor", 1.5, "rope.scaling.attn_factor is 1.5"),
        ("rope.scaling.yarn_attn_factor", 1.5, "rope.scaling.yarn_attn_factor is 1.5"),
        ("rope.scaling.yarn_log_multiplier", 0.0, "divided by 4.0 without YaRN and its weight"),
        ("rope.scaling.yarn_ext_factor", 0.0, "divided by 4.0 without YaRN and its weight"),
        ("nextn_predict_layers", 2, "nextn_predict_layers is 2 for 2 layers"),
        ("attention.head_count_kv", 3, "3 KV heads with keys of 32"),
        ("attention.key_length", 8, "keys of 8"),
    ],
)
def test_metadata_that_cannot_be_is_refused_by_name(
    key: str, value: float, words: str, tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def described(writer: GGUFWriter, family: str, config: Any) -> None:
        describe(writer, family, config)
        writer.kv_data[0].pop(f"deepseek2.{key}", None)
        (writer.add_uint32 if type(value) is int else writer.add_float32)(f"deepseek2.{key}", value)

    describe = gguf_experts._describe
    monkeypatch.setattr(gguf_experts, "_describe", described)
    write_experts(tmp_path / "m.gguf", tiny_model("deepseek2"), "deepseek2")
    with pytest.raises(ModelError, match=words):
        open_source(tmp_path / "m.gguf")


def test_a_file_with_both_forms_is_read_by_the_one_tensor(tiny_model: Models, tmp_path: Path) -> None:
    """Some converters wrote keys and values twice."""
    model = tiny_model("deepseek2")
    more = {name: values for name, values in tensors(model, "deepseek3").items() if "_b.weight" in name}
    assert more
    write = gguf_experts.tensors
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_experts, "tensors", lambda *given: write(*given) | more)
        write_experts(tmp_path / "m.gguf", model, "deepseek2")
    pack_model(open_source(tmp_path / "m.gguf"), "f32", tmp_path / "pack")
    got = forward(Pack.open(tmp_path / "pack"), TOKENS)
    pack_model(open_source(model.directory), "f32", tmp_path / "other")
    np.testing.assert_allclose(got, forward(Pack.open(tmp_path / "other"), TOKENS), atol=2e-5)


def test_unclaimed_rows_of_heads_are_named(tiny_model: Models) -> None:
    opened = open_source(tiny_model("deepseek2").directory)
    attention, *others = opened.model.layers[0]
    without = replace(attention, parts=tuple(part for part in attention.parts if part[0] != "v"))
    model = replace(opened.model, layers=((without, *others), *opened.model.layers[1:]))
    with pytest.raises(ModelError, match=r"rows 24 and others of each head of model.layers.0.self_attn.kv_b_proj"):
        check_all_tensors_used(model, opened.source)
    opened.source.close()
