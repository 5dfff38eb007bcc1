"""A source whose quantised matrices are joined from their codes, scales and zero points."""

from collections.abc import Callable, Mapping
from typing import Any

from tpi.sources.base import Bytes, Source, SourceTensor
from tpi.sources.fp8 import ACTIVATIONS, apply_scales
from tpi.sources.quantised.compressed import compressed
from tpi.sources.quantised.floats import fp8, microscaled, modelopt
from tpi.sources.quantised.gptq import awq, gptq
from tpi.sources.quantised.groups import DEQUANTISED
from tpi.sources.quantised.matrices import Joined
from tpi.sources.quantised.method import Config, Method, unsupported
from tpi.sources.quantised.mlx import mlx

MLX = "quantization"
FIELD = "quantization_config"
_METHODS: dict[object, Callable[[Config], Method]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "fp8": fp8,
    "modelopt": modelopt,
}


def method_of(fields: Mapping[str, Any]) -> Method | None:
    """Return the method that quantised a model's weights, or None if they are not quantised.

    `fields` are those of the model's config.json.

    Raises:
        ModelError: if they are quantised in a way that is not supported; the message names it.
    """
    config = fields.get(FIELD)
    if isinstance(fields.get(MLX), Mapping):
        if config not in (None, fields[MLX]):
            raise unsupported(f"{MLX} and {FIELD} differ")
        return mlx(fields[MLX])
    if not config:
        return None
    name = config.get("quant_method") if isinstance(config, Mapping) else None
    if name == "mxfp4":
        return microscaled(config, suffix=_is_gpt_oss(fields))
    if not isinstance(config, Mapping) or name not in _METHODS:
        raise unsupported(_named(config))
    return _METHODS[name](config)


def _is_gpt_oss(fields: Mapping[str, Any]) -> bool:
    """Return True if the model is a gpt-oss model.

    Its experts are either MXFP4 or floats stored transposed; the names of the tensors tell which.
    """
    return "GptOssForCausalLM" in str(fields.get("architectures"))


def _named(config: Any) -> str:
    """Return the words by which a configuration identifies its method, or "of no name"."""
    parts = [config.get(name) for name in ("quant_method", "format")] if isinstance(config, Mapping) else []
    return ", ".join(str(part)[:40] for part in parts if part) or "of no name"


def join_quantised(source: Source, method: Method) -> tuple[Source, tuple[str, ...]]:
    """Return `source` with the tensors of each quantised matrix joined, and sentences to show to the user.

    Raises:
        ModelError: if a tensor is missing or has a shape that does not fit; the message names it.
    """
    joined: dict[str, Joined] = {}
    used: set[str] = set()
    for matrices, names in method.join(source):
        joined |= {matrix.tensor.name: matrix for matrix in matrices}
        used.update(names)
    found: Source = _JoinedSource(source, joined, used)
    return (found if method.fp8 is None else apply_scales(found, method.fp8)), (*method.notes, *_losses(joined))


def _losses(joined: Mapping[str, Joined]) -> tuple[str, ...]:
    """Return a sentence about the matrices whose codes no format can keep. Return nothing if there are none."""
    kinds = [name for matrix in joined.values() if (name := matrix.tensor.element.name).endswith(DEQUANTISED)]
    if not kinds:
        return ()
    count, shown = len(kinds), ", ".join(sorted({kind.removesuffix(DEQUANTISED) for kind in kinds}))
    return (
        f"no format keeps the codes of {count} of its {len(joined)} quantised matrices ({shown}: 8 bits with minima, "
        "groups that are not multiples of 32, or reordered columns); they are rounded anew, to q8 with --dtype auto",
    )


class _JoinedSource:
    """A `Source` in which the matrices `joined` replace the tensors `used`, which they are made from."""

    def __init__(self, source: Source, joined: Mapping[str, Joined], used: set[str]) -> None:
        self.label = source.label
        others = {
            name: tensor
            for name, tensor in source.tensors.items()
            if name not in used and not name.endswith(ACTIVATIONS)
        }
        self.tensors: Mapping[str, SourceTensor] = others | {name: each.tensor for name, each in joined.items()}
        self._source, self._joined = source, joined

    def read(self, tensor: SourceTensor, rows: tuple[int, int], columns: tuple[int, int]) -> Bytes:
        """Return the bytes of a rectangle of `tensor`, uint8 `[rows, bytes]`, in the coding `tensor.element`."""
        if tensor.name in self._joined:
            return self._joined[tensor.name].read(self._source, rows, columns)
        return self._source.read(tensor, rows, columns)

    def close(self) -> None:
        self._source.close()


def without_quantisation(fields: Config, method: Method | None) -> Config:
    """Return the fields of a config.json without those that `method` has read."""
    keep = method is not None and getattr(method, "suffix", False)
    return fields if method is None or keep else {k: v for k, v in fields.items() if k not in (FIELD, MLX)}
