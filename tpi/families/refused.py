"""Reasons why known architectures are not supported, and what to use instead, for messages."""

_HYPER = "use Qwen 3.5 or 3.6, or GLM-4.7"
_QWEN4 = f"it needs hyper-connections, indexed sparse attention and hashed n-gram embeddings; {_HYPER}"
_DEEPSEEK4 = f"it needs compressed sparse attention, hyper-connections and experts chosen by a hash; {_HYPER}"
_INKLING = "it needs relative positions in attention, short convolutions and layers used in loops; use Gemma 3"
_REASONS = {
    "PhimoeForCausalLM": "its router has its own way of selecting experts; use another model with experts",
    "Phi3SmallForCausalLM": "its attention is block-sparse; use Phi-3 mini or medium, or Phi-4",
    "Qwen4ExpForCausalLM": _QWEN4,
    "Qwen4ExpForConditionalGeneration": _QWEN4,
    "DeepseekV4ForCausalLM": _DEEPSEEK4,
    **{
        f"Inkling{name}For{kind}": _INKLING
        for name in ("", "2", "2Loop")
        for kind in ("CausalLM", "ConditionalGeneration")
    },
}
_GGUF_REASONS = {
    "qwen4exp": _QWEN4, "deepseek4": _DEEPSEEK4,
}  # fmt: skip


def why_unsupported(architecture: str) -> str:
    """Return the reason why an architecture of a config.json is not supported; an empty string if it is not known."""
    return _REASONS.get(architecture, "")


def why_unsupported_gguf(architecture: object) -> str:
    """Return the reason why an architecture of a GGUF file is not supported; an empty string if it is not known."""
    return _GGUF_REASONS.get(architecture, "") if isinstance(architecture, str) else ""
