"""Weights in floating-point codes: FP8 of DeepSeek and Qwen, NVFP4 and FP8 of NVIDIA's ModelOpt, MXFP4 of OpenAI."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpi.sources.base import Source, read_vector
from tpi.sources.fp8 import Fp8Scales
from tpi.sources.quantised.compressed import ACTIVATIONS, KEYS_AND_VALUES, mxfp4, nvfp4
from tpi.sources.quantised.matrices import Joined
from tpi.sources.quantised.method import (
    Config,
    Scheme,
    check_fields,
    field,
    is_left_out,
    misfit,
    names_in,
    one_of,
    tensor_of,
    unsupported,
)

BLOCKS = "_blocks"
_FP8 = ("quant_method", "activation_scheme", "fmt", "scale_fmt", "dequantize", "weight_block_size")
_MODELOPT = (
    "quant_method", "config_groups", "ignore", "quant_algo", "kv_cache_scheme", "producer", "quantization",
    "quantized_layers",
)  # fmt: skip
_NESTED = ("quant_algo", "group_size", "exclude_modules", "kv_cache_quant_algo", "quantized_layers")
_ALGORITHMS = {
    "NVFP4": Scheme("NVFP4", 4, 16), "W4A16_NVFP4": Scheme("NVFP4", 4, 16), "FP8": Scheme("FP8", 8),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("FP8", 8),
}  # fmt: skip


@dataclass(frozen=True)
class Fp8:
    """The settings of a model whose linear layers are in FP8, except those that `left_out` lists."""

    fp8: Fp8Scales
    left_out: tuple[str, ...]
    notes: tuple[str, ...] = (ACTIVATIONS,)

    def scheme(self, module: str) -> Scheme | None:
        """Return FP8 for linear layers that are not left out; None for other modules."""
        other = "embed" in module or module.endswith("lm_head") or is_left_out(module, self.left_out)
        return None if other else Scheme("FP8", 8)

    def join(self, source: Source) -> Iterator[tuple[list[Joined], tuple[str, ...]]]:
        """Yield nothing: `tpi.sources.fp8` applies the scales."""
        return iter(())


@dataclass(frozen=True)
class Modelopt:
    """The settings of a model that ModelOpt quantised.

    `usual` is the scheme of its modules. If modules differ, `layers` has their schemes by name.
    """

    usual: Scheme | None
    layers: Mapping[str, Scheme]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    fp8: Fp8Scales | None

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a module; None if it is not quantised."""
        if self.layers:
            return self.layers.get(module)
        return None if "embed" in module or is_left_out(module, self.left_out) else self.usual

    def join(self, source: Source) -> Iterator[tuple[list[Joined], tuple[str, ...]]]:
        """Yield each NVFP4 matrix and the names of its tensors.

        Raises:
            ModelError: if a tensor is missing, or has a shape that does not fit.
        """
        for codes in list(source.tensors.values()):
            scales = source.tensors.get(f"{codes.name}_scale")
            if codes.element.name != "U8" or scales is None:
                continue
            shared = read_vector(source, f"{codes.name}_scale_2", flat=True)
            if scales.element.name != "F8_E4M3":
                raise misfit(source, scales, scales.shape)
            names = (codes.name, scales.name, f"{codes.name}_scale_2")
            yield [nvfp4(source, codes.name, codes, scales, shared)], names


@dataclass(frozen=True)
class Microscaled:
    """The settings of a model whose experts are in OpenAI's MXFP4.

    A matrix is in two tensors, `x_blocks` (codes) and `x_scales`. They are joined into one tensor, which is called
    `x_blocks` if `suffix` is True, else `x`.
    """

    suffix: bool
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fp8: Fp8Scales | None = None

    def scheme(self, module: str) -> Scheme | None:
        """Return MXFP4 for experts that are not left out; None for other modules."""
        return Scheme("MXFP4", 4, 32) if ".experts" in module and not is_left_out(module, self.left_out) else None

    def join(self, source: Source) -> Iterator[tuple[list[Joined], tuple[str, ...]]]:
        """Yield each MXFP4 matrix and the names of its tensors.

        Raises:
            ModelError: if a tensor is missing, or has a shape that does not fit.
        """
        for blocks in [tensor for name, tensor in source.tensors.items() if name.endswith(BLOCKS)]:
            base = blocks.name.removesuffix(BLOCKS)
            scales = tensor_of(source, f"{base}_scales")
            if blocks.shape != (*scales.shape, 16) or len(scales.shape) < 2 or blocks.element.group_bytes != 1:
                raise misfit(source, blocks, (*scales.shape, 16))
            codes = replace(blocks, shape=(*scales.shape[:-1], 16 * scales.columns))
            joined = mxfp4(source, blocks.name if self.suffix else base, codes, scales)
            yield [joined], (blocks.name, scales.name)


def fp8(config: Config) -> Fp8:
    """Return the settings of a `quantization_config` of FP8.

    Raises:
        ModelError: if a setting is unknown or not supported.
    """
    lists = ("modules_to_not_convert", "ignored_layers")
    check_fields(config, (*_FP8, *lists), "its quantization_config")
    one_of(config, "fmt", ("e4m3",), "e4m3")
    one_of(config, "scale_fmt", ("ue8m0", "float"), "float")  # powers of two, stored as floats
    one_of(config, "dequantize", (False, True), False)
    one_of(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    block = config.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2 and min(map(_size, block)) > 0):
        raise unsupported(f"fp8, weight_block_size is {str(block)[:80]}")
    left_out = tuple(name for each in lists for name in names_in(config, each))
    return Fp8(Fp8Scales.of_block(block), left_out)


def _size(value: Any) -> int:
    return value if type(value) is int else 0


def modelopt(config: Config) -> Modelopt:
    """Return the settings of ModelOpt, from a `quantization_config` or from hf_quant_config.json.

    Raises:
        ModelError: if a setting is unknown or not supported.
    """
    check_fields(config, _MODELOPT, "its quantization_config")
    nested = field(config, "quantization", Mapping, None)
    settings: Config = nested if nested is not None else config
    if nested is not None:
        check_fields(nested, _NESTED, "its hf_quant_config.json")
    left_out = names_in(settings, "exclude_modules") or names_in(settings, "ignore")
    algorithm, layers = settings.get("quant_algo"), dict[str, Scheme]()
    if algorithm == "MIXED_PRECISION":
        layers = {name: _algorithm(each) for name, each in field(settings, "quantized_layers", Mapping, {}).items()}
    else:
        layers = {}
    usual = None if layers else _algorithm({"quant_algo": algorithm, "group_size": settings.get("group_size")})
    known = [*layers.values(), *([usual] if usual else [])]
    notes: tuple[str, ...] = () if algorithm == "W4A16_NVFP4" else (ACTIVATIONS,)
    if settings.get("kv_cache_quant_algo") or config.get("kv_cache_scheme"):
        notes += (KEYS_AND_VALUES,)
    scaled = Fp8Scales() if any(scheme.kind == "FP8" for scheme in known) else None
    return Modelopt(usual, layers, left_out, notes, scaled)


def _algorithm(settings: Any) -> Scheme:
    name = settings.get("quant_algo") if isinstance(settings, Mapping) else None
    if not isinstance(name, str) or name not in _ALGORITHMS:
        raise unsupported(f"modelopt, {str(name)[:80]}")
    scheme = _ALGORITHMS[name]
    check_fields(settings, ("quant_algo", "group_size"), "a module of quantized_layers")
    if scheme.kind == "NVFP4":
        one_of(settings, "group_size", (16,), 16)
    return scheme


def microscaled(config: Config, suffix: bool) -> Microscaled:
    """Return the settings of a `quantization_config` of MXFP4.

    Raises:
        ModelError: if a setting is unknown.
    """
    check_fields(config, ("quant_method", "modules_to_not_convert", "dequantize"), "its quantization_config")
    return Microscaled(suffix, names_in(config, "modules_to_not_convert"))
