"""`--dtype auto` for float models: the most precise format in which the weights fit the nodes' memory."""

from collections.abc import Sequence

from tpi.pack.layout import GROUP, GROUP_BYTES
from tpi.pack.library.locate import Located
from tpi.sources.files import read_json
from tpi.sources.fp8 import fp8_scales

_ROOM = 0.9  # share of the memory for weights; the rest is for the KV cache and activations
_ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_Q8 = GROUP_BYTES["q8"] / GROUP  # bytes of a weight


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
    formats = {"auto": packed, "bf16": 2.0, "q8": _Q8}
    return next((name for name, size in formats.items() if values * size <= room), "q4")


def _source(located: Located) -> tuple[float, int]:
    """Return the bytes of a packed weight and the number of weights of a Hugging Face directory."""
    config = read_json(located.path, "config.json")
    size = sum(file.stat().st_size for file in located.path.glob("*.safetensors"))
    if fp8_scales(config.get("quantization_config")):
        return _Q8, size
    element = config.get("dtype") or config.get("torch_dtype")
    each = _ELEMENT_BYTES.get(element, 4) if isinstance(element, str) else 4
    return each, size // each
