"""Settings of the families with DeltaNet layers from GGUF metadata, and the order of vectors in their tensors."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tpi.config import Delta
from tpi.errors import ModelError
from tpi.families.base import BlockRefs, Fields, Model, Ref, size_field
from tpi.families.delta.settings import adapt, by_key_head
from tpi.families.gguf.experts import mixture
from tpi.families.gguf.prediction import main_layers, without_prediction
from tpi.sources.heads import HeadOrder


def dense(fields: Fields) -> dict[str, Any]:
    """Return the fields of Qwen3.5. The number of layers excludes the last ones, which predict further tokens.

    Raises:
        ModelError: if sizes contradict each other.
    """
    fields.get("rope.dimension_sections")  # all positions of a text token are equal, so the sections do not matter
    layers = main_layers(fields)
    interval = size_field(fields, "full_attention_interval", 4)
    heads, inner = size_field(fields, "ssm.time_step_rank"), size_field(fields, "ssm.inner_size")
    if inner % heads:
        raise ModelError(f"ssm.inner_size {inner} is not a multiple of {heads} heads")
    delta = Delta(
        heads,
        size_field(fields, "ssm.group_count"),
        size_field(fields, "ssm.state_size"),
        inner // heads,
        size_field(fields, "ssm.conv_kernel"),
    )
    recurrent = tuple(int((layer + 1) % interval != 0) for layer in range(min(layers, 1 << 12)))
    listed = fields.get("attention.recurrent_layers")
    if isinstance(listed, list) and len(listed) >= layers:
        recurrent = tuple(int(bool(each)) for each in listed[:layers])
    found: dict[str, Any] = {"layers": layers, "output_gate": True, "mtp_whole": True}
    return found | ({"delta": delta, "recurrent": recurrent} if any(recurrent) else {})


def experts(fields: Fields) -> dict[str, Any]:
    """Return the fields of Qwen3.5 with experts: softmax over all experts, and a shared expert with a sigmoid gate."""
    shared, width = (
        size_field(fields, f"expert_{name}feed_forward_length") for name in ("shared_", "")
    )  # fmt: skip
    given = {} if "feed_forward_length" in fields else {"intermediate": width}
    return dense(fields) | {"mixture": mixture(fields, normalised=True, width=width, shared=shared)} | given


def adapt_refs(model: Model, has: Callable[[str], bool]) -> Model:
    """Return the model with references to the parts of fused tensors, and with its value heads reordered.

    In the result, the value heads that share a key head are neighbours. llama.cpp's converter stores the first value
    head of every key head, then the second one of every key head, and so on.
    """
    delta = model.config.delta
    found = adapt(model, {}, {})
    if delta is None:
        return found
    group = delta.heads // delta.key_heads
    places = [head % group * delta.key_heads + head // group for head in range(delta.heads)]

    def order(width: int, before: int = 0) -> HeadOrder:
        """Return the order of heads of `width` values each, which follow `before` other vectors in the tensor."""
        begins = (before + place * width for place in places)
        return HeadOrder(
            before + delta.heads * width, tuple(at for begin in begins for at in range(begin, begin + width))
        )

    before = 2 * delta.key_heads * delta.key
    parts = {"v": order(delta.value, before), "gate": order(delta.value), "o": order(delta.value)}
    vectors = {
        "a": order(1), "b": order(1), "decay": order(1), "decay.bias": order(1), "conv.v": order(delta.value, before),
    }  # fmt: skip

    def reordered(name: str, ref: Ref, orders: dict[str, HeadOrder]) -> tuple[str, Ref]:
        return name, replace(ref, heads=orders[name], rows=None) if name in orders else ref

    def block(refs: BlockRefs) -> BlockRefs:
        if refs.kind != "delta":
            return refs
        return replace(
            refs,
            parts=tuple(reordered(*one, parts) for one in refs.parts),
            vectors=tuple(reordered(*one, vectors) for one in refs.vectors),
        )

    return without_prediction(replace(found, layers=tuple(tuple(map(block, layer)) for layer in found.layers)))


def adapt_next_refs(model: Model, has: Callable[[str], bool]) -> Model:
    """Return Qwen3-Next's model with references to the parts of fused tensors.

    Its heads are in the pack's order already. One tensor holds b and a, interleaved by key head.
    """
    delta = model.config.delta
    pair = by_key_head({"b": delta.heads // delta.key_heads, "a": delta.heads // delta.key_heads}) if delta else {}
    return without_prediction(adapt(model, {}, pair))
