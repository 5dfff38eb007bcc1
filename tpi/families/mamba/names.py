"""Tensor names of the families with Mamba2 layers, in Hugging Face directories and in GGUF files."""

from tpi.families.expertnames import GGUF_EXPERTS, GGUF_SHARED
from tpi.families.routed.table import GRANITE_SHARED_EXPERTS

PARTS = ("gate", "v", "k", "q", "a")
"""The parts of a fused tensor, in the order of their rows. Those of the convolution are in the middle."""
CONVOLVED = PARTS[1:4]


def block(norm: str, prefix: str, fused: str, names: dict[str, str]) -> dict[str, str]:
    """Return the templates of a Mamba2 block; `names` has those without a layer in them, after `prefix`."""
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
GGUF = block(
    "blk.{i}.attn_norm.weight",
    "blk.{i}.",
    "ssm_in.weight",
    {
        "o": "ssm_out.weight", "decay": "ssm_a", "decay.bias": "ssm_dt.bias", "skip": "ssm_d",
        "out_norm": "ssm_norm.weight", "conv": "ssm_conv1d.weight", "bias": "ssm_conv1d.bias?",
    },
)  # fmt: skip
GGUF_GRANITE_EXPERTS = GGUF_EXPERTS | GGUF_SHARED
