"""`--dtype auto` for float models: the most precise format in which the weights fit the nodes' memory."""

from collections.abc import Sequence

from tpi.pack.layout import GROUP, GROUP_BYTES
from tpi.pack.library.locate import Located

_ROOM = 0.9  # part of the memory for weights; the rest is for the KV cache and activations
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_Q8, _Q4 = GROUP_BYTES["q8"] / GROUP, GROUP_BYTES["q4"] / GROUP  # bytes per weight
_COLUMNS = 1 << 12  # columns of a matrix; layouts do not depend on the actual number
# names of typical modules, in which most weights are
_USUAL = ("model.layers.9.mlp.experts.0.down_proj", "model.layers.9.mlp.down_proj")


def choose_dtype(asked: str, located: Located, memory: Sequence[int], shares: Sequence[float]) -> str:
    """Return the format to pack as: `asked`, unless it is auto and the source is a directory of float weights.

    Args:
        memory: bytes that each node may use, rank 0 first.
        shares: share of the weights that each node gets, of any scale.

    Raises:
        ModelError: if the model's config.json cannot be read.
    """
    if asked != "auto" or located.kind != "directory":
        return asked
    packed, values = _source(located)
    room = _ROOM * min(size / share for size, share in zip(memory, shares, strict=True) if share) * sum(shares)
    formats = {"auto": packed, "bf16": 2.0, "q8": _Q8, "q4": _Q4}
    smallest = min(formats, key=formats.__getitem__)
    return next((name for name, size in formats.items() if values * size <= room), smallest)


def _source(located: Located) -> tuple[float, int]:
    """Return the mean bytes of a packed weight, and the number of weights, of a Hugging Face directory."""
    from tpi.families.huggingface.directory import read_config  # imports all families
    from tpi.sources.quantised.source import method_of

    config = read_config(located.path)
    size = sum(file.stat().st_size for file in located.path.glob("*.safetensors"))
    if (method := method_of(config)) is not None:
        known = (scheme for name in _USUAL if (scheme := method.scheme(name)))
        if (scheme := next(known, None)) is None:
            return _Q8, size
        return GROUP_BYTES[scheme.element(_COLUMNS).nearest] / GROUP, size * 8 // scheme.bits
    element = config.get("dtype") or config.get("torch_dtype")
    each = _ELEMENT_BYTES.get(element, 4) if isinstance(element, str) else 4
    return each, size // each
