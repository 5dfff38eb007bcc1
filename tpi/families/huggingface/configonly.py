"""A source made from a configuration alone: it has the tensors that the model must have, but none can be read."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from tpi.families.base import Fields, Model, Ref
from tpi.families.huggingface.reader import from_huggingface
from tpi.sources.base import FileSource, SourceTensor
from tpi.sources.elements import Element
from tpi.sources.quantised.method import Method
from tpi.sources.quantised.source import method_of

_ELEMENTS = {
    "float32": Element("F32", 1, 4),
    "float16": Element("F16", 1, 2),
    "bfloat16": Element("BF16", 1, 2),
}


def from_config(fields: Fields, where: str) -> tuple[Model, FileSource]:
    """Return the model of a config.json without weights, and a source with all its tensors.

    Each tensor has as many columns as the hidden size, since layouts do not depend on the actual number. Reading a
    tensor fails.

    Args:
        fields: the parsed config.json.
        where: the name of the source in messages.

    Raises:
        ModelError: if the architecture or a setting is not supported, or the configuration is inconsistent.
    """
    # without a head in the source, the configuration and the family's default say whether it is tied to the embedding
    # and a plan does not have the layer for multi-token prediction
    absent = ("lm_head.weight", "eh_proj.weight", "mtp.fc.weight", "mtp_linear_proj.0.weight")
    model = from_huggingface(fields, lambda name: not name.endswith(absent), where)
    kind = str(fields.get("dtype") or fields.get("torch_dtype") or "float32")
    element = _ELEMENTS.get(kind, _ELEMENTS["float32"])
    return model, FileSource(where, _tensors(model, element, method_of(fields), where))


def _tensors(model: Model, element: Element, method: Method | None, where: str) -> Mapping[str, SourceTensor]:
    rows: dict[str, int] = {}
    for ref in _refs(model):
        rows[ref.tensor] = max(rows.get(ref.tensor, 1), ref.rows[1] if ref.rows else 1)
    if model.positions:
        rows[model.positions.tensor] = model.config.context + model.config.position_offset
    columns = model.config.hidden
    elements = dict.fromkeys(rows, element)
    for name in _matrices(model) if method else ():
        scheme = method.scheme(name.removesuffix(".weight")) if method else None
        elements[name] = scheme.element(columns) if scheme else element
    nowhere = Path(where)
    return {name: SourceTensor(name, (count, columns), elements[name], nowhere, 0) for name, count in rows.items()}


def _matrices(model: Model) -> Iterable[str]:
    """Yield the names of the matrices that may be quantised in the model's files."""
    for block in (half for layer in model.layers for half in layer):
        yield from (ref.tensor for _, ref in (*block.parts, *(part for expert in block.experts for part in expert)))
    yield from (ref.tensor for ref in (model.embedding, model.head) if ref)


def _refs(model: Model) -> Iterable[Ref]:
    for block in (*(half for layer in model.layers for half in layer), model.final):
        experts = (part for expert in block.experts for part in expert)
        yield from (ref for _, ref in (*block.parts, *block.vectors, *experts))
    yield from (ref for ref in (model.embedding, model.head, model.positions, *model.per_layer) if ref)
