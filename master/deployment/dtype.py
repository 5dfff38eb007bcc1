"""`--dtype auto` for float models: the most precise format in which the weights fit the nodes' memory."""

from collections.abc import Sequence

from tpi.pack.layout import GROUP, GROUP_BYTES
from tpi.pack.library.locate import Located
from tpi.sources.files import read_json

_ROOM = 0.9  # share of the memory for weights; the rest is for the KV cache and activations
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


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
    element, values = _source(located)
    room = _ROOM * min(size / share for size, share in zip(memory, shares, strict=True) if share) * sum(shares)
    formats = {"auto": _ELEMENT_BYTES[element], "bf16": 2.0, "q8": GROUP_BYTES["q8"] / GROUP}
    return next((name for name, size in formats.items() if values * size <= room), "q4")


def _source(located: Located) -> tuple[str, int]:
    """Return the element type and the number of values of the weights in a Hugging Face directory."""
    config = read_json(located.path, "config.json")
    element = config.get("dtype") or config.get("torch_dtype") or "float32"
    element = element if isinstance(element, str) and element in _ELEMENT_BYTES else "float32"
    size = sum(file.stat().st_size for file in located.path.glob("*.safetensors"))
    return element, size // _ELEMENT_BYTES[element]
