"""The order of vectors in the heads of DeepSeek's tensors, and their order in a pack.

DeepSeek stores a head's unrotated part first; a pack stores the rotated part first. In DeepSeek's tensors, the two
vectors of a rotary pair are next to each other; in a pack, the first vectors of all pairs precede the second ones.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpi.config import Latent, ModelConfig
from tpi.families.base import BlockRefs, Model, Ref
from tpi.sources.heads import HeadOrder


@dataclass(frozen=True)
class HeadSizes:
    """The numbers of values in the parts of a head.

    Attributes:
        unrotated: values of its query and key that are not rotated.
        rope: values of its query and key that are rotated.
        value: values of its value vector.
        rank: values of the latent vector from which keys and values are computed.
        query_rank: values of the latent vector from which queries are computed; 0 if there is none.
    """

    unrotated: int
    rope: int
    value: int
    rank: int
    query_rank: int

    @classmethod
    def of(cls, config: ModelConfig) -> "HeadSizes":
        """Return the sizes in a configuration with latent attention."""
        latent = config.latent
        assert latent is not None  # true of all families with latent attention
        return cls(config.head_dim - latent.rope, latent.rope, latent.value, latent.rank, latent.query_rank)

    def fields(self, norm_eps: float, scale: float) -> dict[str, Any]:
        """Return the ModelConfig fields for these sizes. `scale` multiplies the usual scale of attention scores."""
        size = self.unrotated + self.rope
        return {
            "head_dim": size,
            "attention_scale": scale * size**-0.5,
            "latent": Latent(self.rank, self.rope, self.value, norm_eps, self.query_rank),
        }

    def orders(self, paired: bool) -> dict[str, HeadOrder]:
        """Return the order of vectors for each part of an attention block.

        `paired` is True if the two vectors of a rotary pair are next to each other in the source.
        """
        size, width, both = self.unrotated + self.rope, max(self.unrotated, self.value), self.unrotated + self.value
        turned = HeadOrder.from_interleaved(self.rope).order if paired else tuple(range(self.rope))
        return {
            "q": HeadOrder(size, (*(self.unrotated + at for at in turned), *range(self.unrotated))),
            "o": HeadOrder(self.value, _filled(range(self.value), size)),
            "k": HeadOrder(both, _filled(range(self.unrotated), width)),
            "v": HeadOrder(both, _filled(range(self.unrotated, both), width)),
            "latent": HeadOrder(self.rank + self.rope, (*range(self.rank), *(self.rank + at for at in turned))),
        }


def with_head_orders(model: Model, orders: dict[str, HeadOrder]) -> Model:
    """Return the model with `orders` (by part name) set in the references of its attention blocks."""

    def one(name: str, ref: Ref) -> tuple[str, Ref]:
        return name, replace(ref, heads=orders.get(name.removesuffix(".bias")))

    def block(refs: BlockRefs) -> BlockRefs:
        if refs.kind != "attention":
            return refs
        vectors = tuple(one(name, ref) if name == "latent.bias" else (name, ref) for name, ref in refs.vectors)
        return replace(refs, parts=tuple(one(*part) for part in refs.parts), vectors=vectors)

    return model.with_blocks(block)


def with_separate_kv(model: Model) -> Model:
    """Return the model adapted to GGUF files with separate tensors for keys (transposed) and values."""
    sizes, width = HeadSizes.of(model.config), model.config.kv_width
    apart = {"k": ("attn_k_b", sizes.unrotated, True), "v": ("attn_v_b", sizes.value, False)}

    def one(name: str, ref: Ref) -> tuple[str, Ref]:
        if name not in apart:
            return name, ref
        tensor, size, transposed = apart[name]
        order = HeadOrder(size, _filled(range(size), width))
        return name, replace(ref, tensor=ref.tensor.replace("attn_kv_b", tensor), transposed=transposed, heads=order)

    def block(refs: BlockRefs) -> BlockRefs:
        return replace(refs, parts=tuple(one(*part) for part in refs.parts)) if refs.kind == "attention" else refs

    return model.with_blocks(block)


def with_query_latent(model: Model, own: str, names: Mapping[str, str]) -> Model:
    """Return the model with references for queries that come from a latent vector.

    In a model without such a vector, the name of the tensor of q ends in `own`. `names` has, for each part and vector
    that replaces that tensor, the end of its name.
    """

    def block(refs: BlockRefs) -> BlockRefs:
        if refs.kind != "attention":
            return refs
        parts = dict(refs.parts)
        before = parts["q"].tensor.removesuffix(own)
        found = {name: Ref(before + end) for name, end in names.items()}
        parts |= {"q": replace(parts["q"], tensor=found.pop("q").tensor), "q_latent": found.pop("q_latent")}
        return replace(refs, parts=tuple(parts.items()), vectors=(*refs.vectors, *found.items()))

    return model.with_blocks(block)


def _filled(numbers: Iterable[int], width: int) -> tuple[int, ...]:
    found = tuple(numbers)
    return (*found, *(-1 for _ in range(width - len(found))))
