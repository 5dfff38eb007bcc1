"""MLX: linear layers and embeddings with codes in uint32 words, a scale and a minimum for each group of a row.

A module `M` has `M.weight` `[..., rows, columns * bits / 32]`, `M.scales` `[..., rows, groups]` and the minima
`M.biases`. A weight is `code * scale + minimum`. In the modes mxfp4 and nvfp4, codes are e2m1, scales are bytes, and
there are no minima. Experts are stacked in `M.switch_mlp.up_proj`; here each gets the name that it has in other files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tpi.errors import ModelError
from tpi.sources.base import Source, SourceTensor
from tpi.sources.fp8 import Fp8Scales
from tpi.sources.quantised.compressed import mxfp4, nvfp4
from tpi.sources.quantised.fields import Factors, Packed
from tpi.sources.quantised.matrices import Integers, Joined, Plain, slices
from tpi.sources.quantised.method import Config, Scheme, group_size, misfit, one_of, tensor_of, unsupported

_SETTINGS = ("group_size", "bits", "mode")
_STACKS = (".switch_mlp.", ".switch_glu.")
_BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Mlx:
    """The settings of a model in MLX's format.

    `layers` has, by name, the schemes of modules that differ from the usual scheme; None: not quantised.
    """

    usual: Scheme
    layers: Mapping[str, Scheme | None]
    notes: tuple[str, ...] = ()
    fp8: Fp8Scales | None = None

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a module; None if it is not quantised."""
        return self.layers.get(module, self.usual)

    def join(self, source: Source) -> Iterator[tuple[list[Joined], tuple[str, ...]]]:
        """Yield the matrices of each quantised module, several for a stack of experts, and the names of its tensors.

        Raises:
            ModelError: if a tensor is missing, or has a shape that does not fit.
        """
        for scales in [tensor for name, tensor in source.tensors.items() if name.endswith(".scales")]:
            module = scales.name.removesuffix(".scales")
            scheme = self.scheme(module)
            if scheme is None:
                raise ModelError(f"{source.label}: {module} has scales, but config.json sets its quantization to false")
            words = tensor_of(source, f"{module}.weight")
            matrix = _matrix(source, module, words, scales, scheme)
            names = _experts(module, words) if len(words.shape) == 3 else [f"{module}.weight"]
            made = slices(matrix, names) if len(words.shape) == 3 else [matrix]
            yield made, (words.name, scales.name, f"{module}.biases")
        for stack in [tensor for name, tensor in source.tensors.items() if any(part in name for part in _STACKS)]:
            module = stack.name.removesuffix(".weight")
            if module != stack.name and f"{module}.scales" not in source.tensors and len(stack.shape) == 3:
                yield slices(Plain(stack), _experts(module, stack)), (stack.name,)


def _experts(module: str, words: SourceTensor) -> list[str]:
    """Return a name for each matrix of the stack `words` of `module`: the name that other files give that matrix."""
    stack = next((stack for stack in _STACKS if stack in module), None)
    if stack is None:
        return [f"{module}.{number}.weight" for number in range(words.shape[0])]  # no model has such a tensor
    before, _, part = module.partition(stack)
    return [f"{before}.experts.{number}.{part}.weight" for number in range(words.shape[0])]


def _matrix(source: Source, module: str, words: SourceTensor, scales: SourceTensor, scheme: Scheme) -> Joined:
    name = f"{module}.weight"
    if words.element.name != "U32":
        raise misfit(source, words, words.shape)
    if scheme.kind == "MXFP4":
        return mxfp4(source, name, words, scales)
    if scheme.kind == "NVFP4":
        return nvfp4(source, name, words, scales, None)
    shape = (*scales.shape[:-1], scales.columns * scheme.group)
    packed = (*shape[:-1], shape[-1] * scheme.bits // 32)
    if words.shape != packed or shape[-1] * scheme.bits % 32:
        raise misfit(source, words, packed)
    minima = tensor_of(source, f"{module}.biases", scales.shape)
    tensor = SourceTensor(name, shape, scheme.element(shape[-1]), words.path, words.offset)
    codes = Packed(words, scheme.bits)
    return Integers(tensor, codes, Factors(scales), None, Factors(minima), scheme.bits, scheme.group)


def mlx(config: Config) -> Mlx:
    """Return the settings of the field `quantization` of a config.json.

    Raises:
        ModelError: if a setting is unknown or not supported.
    """
    usual = {name: value for name, value in config.items() if name in _SETTINGS}
    layers = {name: value for name, value in config.items() if name not in _SETTINGS}
    return Mlx(_scheme(usual), {name: _layer(name, value, usual) for name, value in layers.items()})


def _layer(name: str, settings: Any, usual: dict[str, Any]) -> Scheme | None:
    if settings is False:
        return None
    if settings is True:
        return _scheme(usual)
    if not isinstance(settings, Mapping) or not set(settings) <= set(_SETTINGS):
        raise unsupported(f"MLX, quantization has the field {name[:80]!r}")
    return _scheme({**usual, **settings})


def _scheme(config: Config) -> Scheme:
    mode = one_of(config, "mode", ("affine", "mxfp4", "nvfp4"), "affine")
    if mode == "affine":
        bits = one_of(config, "bits", _BITS)
        return Scheme(f"LINE{bits}", bits, group_size(config))
    one_of(config, "bits", (4,), 4)
    size = one_of(config, "group_size", (32 if mode == "mxfp4" else 16,), 32 if mode == "mxfp4" else 16)
    return Scheme(mode.upper(), 4, size)
