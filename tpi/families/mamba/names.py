"""Tensor names of the families with Mamba2 layers, in Hugging Face directories and in GGUF files."""

from tpi.families.expertnames import GGUF_EXPERTS, GGUF_SHARED
from tpi.families.names import GGUF_FFN
from tpi.families.routed.table import GRANITE_SHARED_EXPERTS

PARTS = ("gate", "v", "k", "q", "a")
"""The parts of a fused tensor, in the order of their rows. Those of the convolution are in the middle."""
CONVOLVED = PARTS[1:4]
_UP_DOWN = ("up", "down")


def block(norm: str, prefix: str, fused: str, names: dict[str, str]) -> dict[str, str]:
    """Return the templates of a Mamba2 block by the names of its parts and vectors.

    `norm` is the template of the norm of its input. All other tensor names begin with `prefix`: the rest of the name is
    `fused` for the parts of the input's projection, and in `names` for others.
    """
    biases = {f"conv.{part}.bias": names["bias"] for part in CONVOLVED}
    convolutions = {f"conv.{part}": names["conv"] for part in CONVOLVED}
    own = {name: text for name, text in names.items() if name not in ("conv", "bias")}
    inside = dict.fromkeys(PARTS, fused) | convolutions | biases | own
    return {"norm": norm} | {name: prefix + text for name, text in inside.items()}


_HUGGINGFACE = {
    "o": "out_proj.weight", "decay.log": "A_log", "decay.bias": "dt_bias", "skip": "D", "out_norm": "norm.weight",
    "conv": "conv1d.weight",
}  # fmt: skip
GRANITE = block(
    "layers.{i}.input_layernorm.weight",
    "layers.{i}.mamba.",
    "in_proj.weight",
    _HUGGINGFACE | {"bias": "conv1d.bias?mamba_conv_bias"},
)
_SHARED_MLP = "layers.{i}.shared_mlp."
GRANITE_FFN = {
    "norm": GRANITE_SHARED_EXPERTS["norm"],
    "gate": _SHARED_MLP + "input_linear.weight[gate]",
    "up": _SHARED_MLP + "input_linear.weight[up]",
    "down": _SHARED_MLP + "output_linear.weight",
}
_MIXER = "layers.{i}.mixer."
_NEMOTRON_NORM = {"norm": "layers.{i}.norm.weight"}
NEMOTRON = block(_NEMOTRON_NORM["norm"], _MIXER, "in_proj.weight", _HUGGINGFACE | {"bias": "conv1d.bias?use_conv_bias"})
NEMOTRON_ATTENTION = _NEMOTRON_NORM | {part: f"{_MIXER}{part}_proj.weight" for part in ("q", "k", "v", "o")}
NEMOTRON_FFN = (
    _NEMOTRON_NORM
    | {part: f"{_MIXER}{part}_proj.weight" for part in _UP_DOWN}
    | {f"{part}.bias": f"{_MIXER}{part}_proj.bias?mlp_bias" for part in _UP_DOWN}
)
NEMOTRON_EXPERTS = (
    _NEMOTRON_NORM
    | {"router": _MIXER + "gate.weight", "router.choice": _MIXER + "gate.e_score_correction_bias"}
    | {part: f"{_MIXER}experts.{{e}}.{part}_proj.weight" for part in _UP_DOWN}
    | {f"shared.{part}": f"{_MIXER}shared_experts.{part}_proj.weight" for part in _UP_DOWN}
)
NEMOTRON_MTP = {
    "projection": "mtp.layers.0.eh_proj.weight",
    "token": "mtp.layers.0.enorm.weight",
    "hidden": "mtp.layers.0.hnorm.weight",
    "norm": "mtp.layers.1.final_layernorm.weight",
}
GGUF = block(
    "blk.{i}.attn_norm.weight",
    "blk.{i}.",
    "ssm_in.weight",
    {
        "o": "ssm_out.weight", "decay": "ssm_a", "decay.bias": "ssm_dt.bias", "skip": "ssm_d",
        "out_norm": "ssm_norm.weight", "conv": "ssm_conv1d.weight", "bias": "ssm_conv1d.bias?",
    },
)  # fmt: skip
GGUF_NEMOTRON_FFN = {name: text for name, text in GGUF_FFN.items() if not name.startswith("gate")} | {
    "norm": GGUF["norm"]
}
GGUF_NEMOTRON_EXPERTS = {
    name: text for name, text in (GGUF_EXPERTS | GGUF_SHARED).items() if not name.endswith("gate")
} | {"norm": GGUF["norm"], "router.choice": "blk.{i}.exp_probs_b.bias?"}
GGUF_NEMOTRON_MTP_EXPERTS = GGUF_NEMOTRON_EXPERTS | {"norm": "blk.{i}.post_attention_norm.weight"}
GGUF_GRANITE_EXPERTS = GGUF_EXPERTS | GGUF_SHARED
