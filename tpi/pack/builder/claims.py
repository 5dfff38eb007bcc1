"""Check that the model uses every tensor of its source.

The `Ref`s of a `Model` claim tensors. A `Ref` claims a whole tensor, or some rows of a fused one; then all rows of that
tensor must be claimed. `Model.ignored_tensors` lists `fnmatch` patterns of tensors that need not be in a block: those
already read for the configuration (`rope_freqs.weight` of a GGUF file), and those that can be computed
(`*.rotary_emb.inv_freq`). Any other tensor means that this variant of the architecture is not supported. Without the
tensor the answers would be wrong without any error, so the model is refused.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from tpi.errors import ModelError
from tpi.families.base import Model, Ref
from tpi.sources.base import Source, SourceTensor

_NAMED = 3  # limit of tensor names in the error message


def check_all_tensors_used(model: Model, source: Source) -> None:
    """Raise a ModelError that names the first tensors of `source` which `model` does not use, if there are any."""
    claims: dict[str, list[Ref]] = {}
    for ref in references(model):
        claims.setdefault(ref.tensor, []).append(ref)
    left = [text for tensor in source.tensors.values() for text in _left(tensor, claims, model.ignored_tensors)]
    if left:
        names = ", ".join(left[:_NAMED]) + (f" and {len(left) - _NAMED} more" if len(left) > _NAMED else "")
        raise ModelError(
            f"{source.label} has tensors that {model.config.family} models do not have: {names}; without them its "
            "answers would be wrong, so this variant is refused"
        )


def references(model: Model) -> Iterator[Ref]:
    """Yield all references of the model to tensors of its source."""
    mtp = (*model.mtp.blocks, model.mtp.norms) if model.mtp else ()
    for block in (*(half for layer in model.layers for half in layer), model.final, *mtp):
        yield from (ref for _, ref in (*block.parts, *block.vectors))
        yield from (ref for expert in block.experts for _, ref in expert)
    yield model.embedding
    projection = model.mtp.projection if model.mtp else None
    yield from (ref for ref in (model.head, model.positions, *model.per_layer, projection) if ref)


def _left(tensor: SourceTensor, claims: dict[str, list[Ref]], ignored_tensors: tuple[str, ...]) -> list[str]:
    """Describe the parts of `tensor` that no reference claims. The list is empty if the whole tensor is claimed."""
    refs = claims.get(tensor.name)
    if refs is None:
        return [] if any(fnmatchcase(tensor.name, pattern) for pattern in ignored_tensors) else [tensor.name[:80]]
    if any(ref.rows is None and ref.heads is None for ref in refs):
        return []
    if orders := [ref.heads for ref in refs if ref.heads]:
        ranges = [range(*ref.rows) for ref in refs if ref.rows and not ref.heads]  # rows of a tensor that is one head
        unclaimed = sorted(set(range(orders[0].size)).difference(*(order.order for order in orders), *ranges))
        return [f"rows {unclaimed[0]} and others of each head of {tensor.name[:80]}"] if unclaimed else []
    rows = tensor.rows if len(tensor.shape) > 1 else tensor.columns  # a fused vector is divided by values, not by rows
    end = 0
    for first, last in sorted(ref.rows for ref in refs if ref.rows):
        if first > end:
            break
        end = max(end, last)
    return [] if end >= rows else [f"rows {end} to {rows} of {tensor.name[:80]}"]
