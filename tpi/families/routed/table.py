"""The table of the families of this folder, and their tensor names."""

from dataclasses import replace

from tpi.families.base import Family
from tpi.families.dense.table import ERNIE_ATTENTION, ERNIE_FFN, HUNYUAN_ATTENTION
from tpi.families.expertnames import (
    GGUF_EXPERTS,
    GGUF_OLMOE_ATTENTION,
    GGUF_SHARED,
    GRANITE_EXPERTS,
    MIXTRAL_EXPERTS,
    OLMOE_ATTENTION,
    QWEN_EXPERTS,
)
from tpi.families.gguf.prediction import without_prediction
from tpi.families.latent.settings import dense
from tpi.families.names import (
    GGUF_ATTENTION,
    GGUF_FFN,
    GGUF_HEAD_NORMS,
    LLAMA_ATTENTION,
    MISTRAL_FFN,
    QWEN3_ATTENTION,
)
from tpi.families.routed import defaults, gguf, settings
from tpi.families.sharednames import GGUF_MTP, MTP, MTP_APART, gguf_names, llama_names, with_mtp

_PARTS = ("gate", "up", "down")
GLM4_ATTENTION = {name: text for name, text in QWEN3_ATTENTION.items() if name != "o.bias"} | {
    f"{part}_norm": f"layers.{{i}}.self_attn.{part}_norm.weight?use_qk_norm" for part in ("q", "k")
}
GLM4_EXPERTS = (
    QWEN_EXPERTS
    | {f"shared.{part}": f"layers.{{i}}.mlp.shared_experts.{part}_proj.weight" for part in _PARTS}
    | {"router.choice": "layers.{i}.mlp.gate.e_score_correction_bias"}
)
MINIMAX_ATTENTION = {name: text for name, text in OLMOE_ATTENTION.items() if not name.endswith(".bias")}
MINIMAX_EXPERTS = MIXTRAL_EXPERTS | {"router.choice": "layers.{i}.block_sparse_moe.e_score_correction_bias"}
ERNIE_EXPERTS = (
    QWEN_EXPERTS
    | {f"shared.{part}": f"layers.{{i}}.mlp.shared_experts.{part}_proj.weight" for part in _PARTS}
    | {"router.choice": "layers.{i}.mlp.moe_statics.e_score_correction_bias"}
)
ERNIE_MTP = {
    "projection": "model.mtp_linear_proj.0.weight",
    "token": "model.mtp_emb_norm.0.weight",
    "hidden": "model.mtp_hidden_norm.0.weight",
    "norm": "model.norm.weight",  # the layer shares the model's final norm
}
EXAONE_ATTENTION = {name: text for name, text in QWEN3_ATTENTION.items() if not name.endswith(".bias")}
_CHOICE = "e_score_correction_bias"
EXAONE_EXPERTS = GLM4_EXPERTS | {"router.choice": f"layers.{{i}}.mlp.gate.{_CHOICE}|layers.{{i}}.mlp.{_CHOICE}"}
HUNYUAN_EXPERTS = (
    QWEN_EXPERTS
    | {f"shared.{part}": f"layers.{{i}}.mlp.shared_mlp.{part}_proj.weight" for part in _PARTS}
    | {"router": "layers.{i}.mlp.gate.wg.weight"}
)
_SHARED_MLP = "layers.{i}.shared_mlp."
GRANITE_SHARED_EXPERTS = GRANITE_EXPERTS | {
    "shared.gate": _SHARED_MLP + "input_linear.weight[shared.gate]",
    "shared.up": _SHARED_MLP + "input_linear.weight[shared.up]",
    "shared.down": _SHARED_MLP + "output_linear.weight",
}
_GGUF_CHOICE = {"router.choice": "blk.{i}.exp_probs_b.bias?"}
_GGUF_POST = {"norm": "blk.{i}.post_attention_norm.weight"}
GGUF_GLM4_ATTENTION = GGUF_ATTENTION | {name: f"{text}?" for name, text in GGUF_HEAD_NORMS.items()}
GGUF_CHOSEN_EXPERTS = GGUF_EXPERTS | GGUF_SHARED | _GGUF_CHOICE

ROUTED = (
    Family(
        "glm4moe",
        architectures=("Glm4MoeForCausalLM",),
        names=replace(llama_names(GLM4_ATTENTION, MISTRAL_FFN, GLM4_EXPERTS), mtp=MTP),
        gguf="glm4moe",
        gguf_names=replace(
            gguf_names(GGUF_GLM4_ATTENTION, GGUF_FFN | _GGUF_POST, experts=GGUF_CHOSEN_EXPERTS | _GGUF_POST),
            mtp=GGUF_MTP,
        ),
        gguf_settings=gguf.glm4,
        adapt_gguf_refs=gguf.without_prediction,
        defaults=defaults.GLM4,
        settings=settings.glm4,
        flatten=defaults.glm4,
        dense_layers=dense,
        adapt_refs=settings.without_prediction,
    ),
    Family(
        "minimaxm2",
        architectures=("MiniMaxM2ForCausalLM",),
        names=llama_names(MINIMAX_ATTENTION, {}, MINIMAX_EXPERTS),
        gguf="minimax-m2",
        gguf_names=gguf_names(GGUF_OLMOE_ATTENTION, {}, experts=GGUF_EXPERTS | _GGUF_CHOICE),
        gguf_settings=gguf.minimax,
        defaults=defaults.MINIMAX,
        settings=settings.minimax,
        flatten=defaults.minimax,
    ),
    Family(
        "ernie45moe",
        architectures=("Ernie4_5_MoeForCausalLM",),
        names=with_mtp(llama_names(ERNIE_ATTENTION, ERNIE_FFN, ERNIE_EXPERTS), ERNIE_MTP, block="model.mtp_block.0."),
        gguf="ernie4_5-moe",
        gguf_names=gguf_names(GGUF_ATTENTION, GGUF_FFN, experts=GGUF_CHOSEN_EXPERTS),
        gguf_settings=gguf.ernie,
        interleaved_rope=True,
        defaults=defaults.ERNIE,
        settings=settings.ernie,
        flatten=defaults.ernie,
        dense_layers=settings.dense_ernie,
        adapt_refs=settings.adapt_ernie,
    ),
    Family(
        "exaonemoe",
        architectures=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),  # files have both spellings
        names=with_mtp(llama_names(EXAONE_ATTENTION, MISTRAL_FFN, EXAONE_EXPERTS), MTP_APART),
        gguf="exaone-moe",
        gguf_names=replace(
            gguf_names(GGUF_ATTENTION | GGUF_HEAD_NORMS, GGUF_FFN, experts=GGUF_CHOSEN_EXPERTS), mtp=GGUF_MTP
        ),
        gguf_settings=gguf.exaone,
        adapt_gguf_refs=lambda model, has: without_prediction(model),
        defaults=defaults.EXAONE,
        settings=settings.exaone,
        dense_layers=settings.dense_exaone,
        adapt_refs=settings.adapt_exaone,
    ),
    Family(
        "granitemoeshared",
        architectures=("GraniteMoeSharedForCausalLM",),
        names=llama_names(LLAMA_ATTENTION, {}, GRANITE_SHARED_EXPERTS),
        defaults=defaults.GRANITE_SHARED,
        settings=settings.granite_shared,
    ),
    Family(
        "hunyuanmoe",
        architectures=("HunYuanMoEV1ForCausalLM",),
        names=llama_names(HUNYUAN_ATTENTION, {}, HUNYUAN_EXPERTS),
        gguf="hunyuan-moe",
        gguf_names=gguf_names(GGUF_ATTENTION | GGUF_HEAD_NORMS, {}, experts=GGUF_EXPERTS | GGUF_SHARED),
        gguf_settings=gguf.hunyuan,
        defaults=defaults.HUNYUAN,
        settings=settings.hunyuan,
        flatten=defaults.hunyuan,
    ),
)
