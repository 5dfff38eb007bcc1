"""Experts in packs: one run, expert after expert, from each form in which families store them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFWriter

from tests.support.models import MIXTURES, SIZES, TOKENS, TinyModel, forward
from tests.support.weights import gguf_experts
from tests.support.weights.gguf_experts import tensors, write_experts
from tests.support.weights.gguf_models import decoded
from tests.support.weights.packs import part
from tests.support.weights.split import split_forward
from tpi.config import Mixture
from tpi.errors import ModelError
from tpi.families.checks import check_mixture
from tpi.families.huggingface.reader import from_huggingface
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.manifest import Manifest
from tpi.pack.reader import Pack

F32 = npt.NDArray[np.float32]
Models: TypeAlias = Callable[[str], TinyModel]
Packs: TypeAlias = Callable[..., Pack]


def experts_of(model: TinyModel, layer: int) -> dict[str, F32]:
    """Return gate, up and down of each expert, `[experts, neurons, hidden]`, read from transformers' modules."""
    state = {name: tensor.numpy() for name, tensor in model.reference.state_dict().items()}
    if model.reference.config.model_type == "dbrx":
        at = f"transformer.blocks.{layer}.ffn.experts.mlp."
        experts = model.reference.config.ffn_config.moe_num_experts
        cut = {"gate": "w1", "up": "v1", "down": "w2"}
        return {name: state[at + tensor].reshape(experts, -1, SIZES["hidden_size"]) for name, tensor in cut.items()}
    if model.reference.config.model_type == "gpt_oss":
        fused = state[f"model.layers.{layer}.mlp.experts.gate_up_proj"].swapaxes(1, 2)
        return {
            "gate": fused[:, ::2], "up": fused[:, 1::2], "down": state[f"model.layers.{layer}.mlp.experts.down_proj"],
        }  # fmt: skip
    block = "block_sparse_moe" if model.reference.config.model_type == "granitemoe" else "mlp"
    at = f"model.layers.{layer}.{block}.experts."
    gate, up = np.split(state[at + "gate_up_proj"], 2, axis=1)
    return {"gate": gate, "up": up, "down": state[at + "down_proj"].swapaxes(1, 2)}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_pack_holds_exactly_the_experts(name: str, tiny_model: Models, tiny_pack: Packs) -> None:
    pack = tiny_pack(name)
    pack.verify()
    block, mixture = pack.layers[1][1], pack.config.mixture
    assert mixture is not None
    assert block.kind == "experts"
    for item, experts in experts_of(tiny_model(name), 1).items():
        found = part(block, "neuron", item).reshape(mixture.experts, -1, pack.config.hidden)
        np.testing.assert_array_equal(found[:, : mixture.width], experts)
        assert not found[:, mixture.width :].any()


def test_layers_may_be_dense(tiny_pack: Packs) -> None:
    assert [[block.kind for block in layer] for layer in tiny_pack("qwen2moe").layers] == [
        ["attention", "ffn"],
        ["attention", "experts"],
    ]


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("shares", [(1.0,), (3, 2, 1), (1, 0, 2), (1, 1, 1, 1, 1)])
def test_logits_equal_those_of_transformers(
    name: str, shares: tuple[float, ...], tiny_model: Models, tiny_pack: Packs
) -> None:
    """A prompt, then token by token. Five nodes are more than an expert has units, so each has whole experts."""
    import torch

    pack = tiny_pack(name)
    if len(shares) > pack.layers[0][0].run("query").units or (len(shares) > 4 and name == "qwen2moe"):
        pytest.skip("its dense parts have fewer units than there are nodes")
    with torch.no_grad():
        expected = tiny_model(name).reference(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(split_forward(pack, TOKENS, shares, steps=4), expected, atol=1e-4)


@pytest.mark.parametrize(("dtype", "limit"), [("q8", 0.02), ("q4", 0.3)])
@pytest.mark.parametrize("name", ["qwen3moe", "granitemoe"])
def test_quantised_packs_stay_close(name: str, dtype: str, limit: float, tiny_pack: Packs) -> None:
    expected, got = forward(tiny_pack(name), TOKENS), forward(tiny_pack(name, dtype), TOKENS)
    assert np.linalg.norm(got - expected) < limit * np.linalg.norm(expected)


MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], **SIZES}


def config_of(**fields: Any) -> Mixture:
    found = from_huggingface(fields, lambda name: True, "test").config.mixture
    assert found is not None
    return found


def test_one_field_under_two_names() -> None:
    assert config_of(**MIXTRAL, num_experts=6).experts == config_of(**MIXTRAL, num_local_experts=6).experts == 6
    assert config_of(**MIXTRAL).experts == 8
    with pytest.raises(ModelError, match="num_local_experts is 4, but num_experts, which means the same, is 6"):
        config_of(**MIXTRAL, num_experts=6, num_local_experts=4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["Qwen2MoeForCausalLM"], "layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": 3}, "mlp_only_layers"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": 1}, "norm_topk_prob"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": -1.0}, "clip_qkv is -1.0"),
        ({"num_experts_per_tok": 9, "num_local_experts": 8}, "used of its experts is 9"),
        ({"architectures": ["DbrxForCausalLM"], "ffn_config": {"moe_normalize_expert_weights": 2.0}}, "moe_normalize"),
        ({"architectures": ["DbrxForCausalLM"], "ffn_config": {"ffn_act_fn": {"name": "tanh"}}}, "tanh"),
    ],
)
def test_variants_that_cannot_be_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        from_huggingface(MIXTRAL | fields, lambda name: True, "test")


@pytest.mark.parametrize(
    "change",
    [
        {"experts": 0}, {"used": 9}, {"width": 0}, {"shared": -1}, {"groups": 3}, {"groups_used": 5}, {"group_best": 3},
        {"scores": "tanh"}, {"scale": float("nan")}, {"normalised": 1}, {"groups": 4, "used": 3},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    sound = Mixture(8, 2, 32, groups=4, groups_used=1)
    check_mixture(sound, "it")
    with pytest.raises(ModelError):
        check_mixture(replace(sound, **change), "it")


def test_a_manifest_without_its_experts_is_damaged(tiny_model: Models, tmp_path: Path) -> None:
    pack_model(open_source(tiny_model("mixtral").directory), "f32", tmp_path / "pack")
    path = tmp_path / "pack" / "manifest.json"
    text = path.read_text()
    for damaged in (text.replace('"experts": 5', '"experts": 4'), text.replace('"router"', '"rooter"')):
        path.write_text(damaged)
        with pytest.raises(ModelError, match="cannot be used"):
            Manifest.load(path)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_gguf_file_gives_the_model_of_the_directory(
    name: str, tiny_model: Models, tiny_pack: Packs, tmp_path: Path
) -> None:
    write_experts(tmp_path / "m.gguf", tiny_model(name), name)
    pack_model(open_source(tmp_path / "m.gguf"), "f32", tmp_path / "pack")
    pack, expected = Pack.open(tmp_path / "pack"), tiny_pack(name)
    assert pack.config.mixture == expected.config.mixture
    for shares in ((1.0,), (3, 2, 1)):
        got = split_forward(pack, TOKENS, shares, steps=3)
        np.testing.assert_allclose(got, forward(expected, TOKENS), atol=2e-5)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_quantised_experts_in_gguf_are_read_exactly(
    kind: str, tiny_model: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns of down have 100 values here, not whole groups, so the file has them in F32; other codes are kept."""
    model = tiny_model("qwen3moe")
    write_experts(tmp_path / "m.gguf", model, "qwen3moe", lambda name: "F32" if "down" in name else kind)
    pack_model(open_source(tmp_path / "m.gguf"), "auto", tmp_path / "pack")
    block = Pack.open(tmp_path / "pack").layers[0][1]
    format = {"Q4_0": "q4s", "Q4_1": "q4", "Q8_0": "q8"}[kind]
    assert [item.format for item in block.run("neuron").parts] == [format, format, "q8"]
    stacks = tensors(model, "qwen3moe")
    for item in ("gate", "up"):
        values = decoded(stacks[f"blk.0.ffn_{item}_exps.weight"], kind).reshape(8, 100, 96)
        np.testing.assert_array_equal(part(block, "neuron", item).reshape(8, 128, 96)[:, :100], values)
    assert "re-quantised: F32 as q8, relative" in capsys.readouterr().err


SAID: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3moe", {"expert_weights_norm": True}, {}),
    ("qwen3moe", {"expert_weights_norm": False}, {"normalised": False}),
    ("olmoe", {"expert_weights_norm": True}, {"normalised": True}),
    ("dbrx", {"expert_weights_norm": True}, {}),
    ("granitemoe", {"expert_weights_norm": True, "expert_shared_count": 0}, {}),
    ("olmoe", {"expert_weights_scale": 0.5}, {"scale": 0.5}),
    ("mixtral", {"expert_weights_scale": 0.0}, {}),
    ("gptoss", {"expert_gating_func": 3}, {}),
    ("gptoss", {"expert_gating_func": 0}, {}),
    ("olmoe", {"expert_gating_func": 3}, {"normalised": True}),
    ("olmoe", {"expert_gating_func": 2}, {"scores": "sigmoid"}),
    ("qwen2moe", {"expert_shared_count": 1, "expert_group_count": 1, "expert_group_used_count": 1}, {}),
    (
        "olmoe",
        {"expert_gating_func": 2, "expert_group_count": 3, "expert_group_used_count": 2},
        {"scores": "sigmoid", "groups": 3, "groups_used": 2, "group_best": 2},
    ),
    ("qwen3moe", {"expert_group_count": 4, "expert_group_used_count": 4}, {}),
    ("deepseek2", {"expert_weights_norm": True}, {"normalised": True}),
]
NOT_SUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("olmoe", {"expert_gating_func": 4}, "expert_gating_func is 4; softmax and sigmoid"),
    ("qwen2moe", {"expert_shared_count": 2}, "expert_shared_count is 2; this architecture has 1"),
    ("olmoe", {"expert_shared_count": 1}, "olmoe.expert_shared_count"),
    ("granitemoe", {"expert_shared_count": 1}, "granitemoe.expert_shared_count"),
    ("qwen3moe", {"expert_group_count": 4, "expert_group_used_count": 2}, "expert_group_count is 4 with scores"),
    ("deepseek2", {"expert_group_count": 4, "expert_group_used_count": 2}, "expert_group_count is 4 with scores"),
    ("qwen3moe", {"expert_weights_norm": 1}, "expert_weights_norm is '1'; true or false"),
]


def write_with(path: Path, model: TinyModel, family: str, keys: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    """Write a model as `write_experts` does, with these keys."""
    describe = gguf_experts._describe

    def described(writer: GGUFWriter, family: str, config: Any) -> None:
        describe(writer, family, config)
        for key, value in keys.items():
            name = f"{gguf_experts.ARCHITECTURES.get(family, family)}.{key}"
            writer.kv_data[0].pop(name, None)
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
            add(name, value)

    patch.setattr(gguf_experts, "_describe", described)
    write_experts(path, model, family)


@pytest.mark.parametrize(("family", "keys", "change"), SAID)
def test_what_gguf_says_of_experts_counts(
    family: str,
    keys: dict[str, Any],
    change: dict[str, Any],
    tiny_model: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_experts(tmp_path / "plain.gguf", tiny_model(family), family)
    plain = open_source(tmp_path / "plain.gguf").model.config
    write_with(tmp_path / "m.gguf", tiny_model(family), family, keys, monkeypatch)
    assert plain.mixture is not None
    assert open_source(tmp_path / "m.gguf").model.config == replace(plain, mixture=replace(plain.mixture, **change))


@pytest.mark.parametrize(("family", "keys", "words"), NOT_SUPPORTED)
def test_unsupported_expert_fields_of_gguf_are_refused(
    family: str, keys: dict[str, Any], words: str, tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_with(tmp_path / "m.gguf", tiny_model(family), family, keys, monkeypatch)
    with pytest.raises(ModelError, match=words):
        open_source(tmp_path / "m.gguf")


def test_shared_experts_are_there_exactly_if_the_metadata_says_so(
    tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says: dict[str, Any] = {"expert_shared_feed_forward_length": 32}
    write_with(tmp_path / "m.gguf", tiny_model("granitemoe"), "granitemoe", says, monkeypatch)
    with pytest.raises(ModelError, match=r"no tensor blk.0.ffn_gate_shexp.weight"):
        pack_model(open_source(tmp_path / "m.gguf"), "f32", tmp_path / "pack")


@pytest.mark.parametrize("family", ["qwen2moe", "qwen3moe"])
def test_older_files_give_the_neurons_of_all_experts_of_a_token(
    family: str, tiny_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, width = tiny_model(family).reference.config.num_experts_per_tok, 100
    write_with(tmp_path / "m.gguf", tiny_model(family), family, {"feed_forward_length": used * width,
               "expert_feed_forward_length": 0}, monkeypatch)  # fmt: skip
    mixture = open_source(tmp_path / "m.gguf").model.config.mixture
    assert mixture is not None
    assert mixture.width == width
