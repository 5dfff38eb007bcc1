"""compressed-tensors: groups of integers (packed or int8), NVFP4, MXFP4 and FP8, with a scheme for each module.

A module `M` has its codes in `M.weight_packed`, or in `M.weight` as int8. `M.weight_scale` has the scales, one for each
group of a row, each row, or the tensor. `M.weight_zero_point` has zero points, packed like the codes but along rows.
Integer codes are stored with 2^(bits - 1) added. `M.weight_global_scale` divides the scales of NVFP4.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.sources.base import Source, SourceTensor, read_vector
from tpi.sources.fp8 import Fp8Scales
from tpi.sources.quantised.fields import Bytes8, Factors, Packed, read_all
from tpi.sources.quantised.matrices import Integers, Joined, Mxfp4, Nvfp4
from tpi.sources.quantised.method import (
    Config,
    Scheme,
    check_fields,
    field,
    group_size,
    matches,
    misfit,
    names_in,
    one_of,
    tensor_of,
    unsupported,
)

KEYS_AND_VALUES = "its format of keys and values is not used: --kv-dtype sets one"
ACTIVATIONS = (
    "activations are not rounded as its configuration says: they stay in float32, and scales of them are unused"
)
_CONFIG = (
    "quant_method", "format", "quantization_status", "config_groups", "ignore", "kv_cache_scheme",
    "global_compression_ratio", "version",
)  # fmt: skip
_SCHEME = ("targets", "weights", "input_activations", "format")
_WEIGHTS = (
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "observer",
    "observer_kwargs", "scale_dtype", "zp_dtype",
)  # fmt: skip
_FORMATS = {  # format to the type of its codes and their bits
    "pack-quantized": ("int", (1, 2, 3, 4, 5, 6, 7, 8)), "int-quantized": ("int", (2, 3, 4, 5, 6, 7, 8)),
    "float-quantized": ("float", (8,)), "naive-quantized": ("float", (8,)),
    "nvfp4-pack-quantized": ("float", (4,)), "mxfp4-pack-quantized": ("float", (4,)),
}  # fmt: skip
_NO_SPARSITY = (None, "dense")
_PACKED = ".weight_packed"


@dataclass(frozen=True)
class Compressed:
    """The settings of a model in the format compressed-tensors: its schemes, each with the modules that it is for."""

    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignored: tuple[str, ...]
    notes: tuple[str, ...]
    fp8: Fp8Scales | None

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme whose target fits the module best.

        A target that is the module's name comes first, then one that is a pattern, then `Linear`, which means all
        linear layers.
        """
        if "embed" in module or any(_is_target(entry, module) for entry in self.ignored):
            return None
        return self._chosen(module)

    def _chosen(self, module: str) -> Scheme | None:
        ordered = [(target, scheme) for targets, scheme in self.schemes for target in targets]
        ordered.sort(key=lambda each: 2 if each[0] == "Linear" else int(each[0].startswith("re:")))
        return next((scheme for target, scheme in ordered if target == "Linear" or _is_target(target, module)), None)

    def join(self, source: Source) -> Iterator[tuple[list[Joined], tuple[str, ...]]]:
        """Yield each quantised matrix, except those in FP8, and the names of its tensors.

        Raises:
            ModelError: if a tensor is missing, has a shape that does not fit, or is of a module without a scheme.
        """
        for tensor in list(source.tensors.values()):
            packed = tensor.name.endswith(_PACKED)
            if not packed and (tensor.element.name != "I8" or not tensor.name.endswith(".weight")):
                continue
            module = tensor.name.removesuffix(_PACKED).removesuffix(".weight")
            scheme = self._chosen(module)
            if scheme is None or scheme.kind == "FP8":
                raise ModelError(
                    f"{source.label}: {module} has codes, but its quantization_config has no scheme for it"
                )
            yield [self._matrix(source, module, tensor, scheme)], tuple(
                module + suffix
                for suffix in (
                    _PACKED, ".weight", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx",
                    ".weight_global_scale",
                )
            )  # fmt: skip

    def _matrix(self, source: Source, module: str, codes: SourceTensor, scheme: Scheme) -> Joined:
        scales = tensor_of(source, f"{module}.weight_scale")
        if scheme.kind == "MXFP4":
            return mxfp4(source, f"{module}.weight", codes, scales)
        if scheme.kind == "NVFP4":
            shared = read_vector(source, f"{module}.weight_global_scale", flat=True)
            return nvfp4(source, f"{module}.weight", codes, scales, shared, divided=True)
        return _integers(source, module, codes, scales, scheme)


def mxfp4(source: Source, name: str, codes: SourceTensor, scales: SourceTensor) -> Mxfp4:
    """Return the matrix `name` of MXFP4 codes `[..., rows, bytes]` and scales `[..., rows, groups]`.

    Raises:
        ModelError: if their shapes do not fit.
    """
    shape = (*scales.shape[:-1], 32 * scales.columns)
    if scales.element.group_bytes != 1 or codes.row_bytes * 2 != shape[-1] or codes.shape[:-1] != shape[:-1]:
        raise misfit(source, scales, (*codes.shape[:-1], codes.row_bytes * 2 // 32))
    element = Scheme("MXFP4", 4).element(shape[-1])
    return Mxfp4(SourceTensor(name, shape, element, codes.path, codes.offset), Packed(codes, 4), scales)


def nvfp4(
    source: Source, name: str, codes: SourceTensor, scales: SourceTensor, shared: npt.NDArray[np.float32] | None,
    divided: bool = False,
) -> Nvfp4:  # fmt: skip
    """Return the matrix `name` of NVFP4 codes `[..., rows, bytes]` and scales `[..., rows, groups]`.

    `shared` is the scale of the whole matrix, or of each matrix of a stack. If `divided`, it divides the other scales.

    Raises:
        ModelError: if their shapes do not fit.
    """
    shape = (*scales.shape[:-1], 16 * scales.columns)
    if scales.element.group_bytes != 1 or codes.row_bytes * 2 != shape[-1] or codes.shape[:-1] != shape[:-1]:
        raise misfit(source, scales, (*codes.shape[:-1], codes.row_bytes * 2 // 16))
    if shared is not None and shared.size not in (1, *shape[:-2]):
        raise ModelError(f"{source.label}: {name} has {shared.size} scales for the whole matrix instead of one")
    element = Scheme("NVFP4", 4).element(shape[-1])
    tensor = SourceTensor(name, shape, element, codes.path, codes.offset)
    return Nvfp4(tensor, Packed(codes, 4), Factors(scales), shared, divided)


def _integers(source: Source, module: str, codes: SourceTensor, scales: SourceTensor, scheme: Scheme) -> Integers:
    bits, packed = scheme.bits, codes.name.endswith(_PACKED)
    shape = codes.shape
    if packed:
        shape = tuple(int(size) for size in read_all(source, tensor_of(source, f"{module}.weight_shape")))
        words = -(-shape[-1] * bits // 32) if shape else 0
        if codes.element.name != "I32" or codes.shape != (*shape[:-1], words):
            raise misfit(source, codes, (*shape[:-1], words))
    rows, columns = SourceTensor("", shape, codes.element, codes.path, 0).rows, shape[-1]
    group = scheme.group or columns
    of_groups = -(-columns // group)
    scales = _as_matrix(source, scales, rows, of_groups)
    order = _order(source, f"{module}.weight_g_idx", columns, group)
    scheme = replace(scheme, reordered=order is not None)
    tensor = SourceTensor(f"{module}.weight", shape, scheme.element(columns), codes.path, codes.offset)
    held = Packed(codes, bits) if packed else Bytes8(codes, 1 << (bits - 1))
    zeros = None if scheme.symmetric else _zeros(source, module, (rows, of_groups), bits, packed)
    return Integers(tensor, held, Factors(scales), zeros, None, bits, group, order=order)


def _zeros(source: Source, module: str, shape: tuple[int, int], bits: int, packed: bool) -> Packed | Bytes8:
    zeros = tensor_of(source, f"{module}.weight_zero_point")
    rows, of_groups = shape
    if not packed:
        if zeros.rows * zeros.columns != rows * of_groups or zeros.element.name != "I8":
            raise misfit(source, zeros, (rows, of_groups))
        return Bytes8(replace(zeros, shape=(rows, of_groups)), 1 << (bits - 1))
    if zeros.element.name != "I32" or zeros.shape != (-(-rows * bits // 32), of_groups):
        raise misfit(source, zeros, (-(-rows * bits // 32), of_groups))
    return Packed(zeros, bits, "column")


def _as_matrix(source: Source, tensor: SourceTensor, rows: int, of_groups: int) -> SourceTensor:
    """Return `tensor` with the shape `[rows, groups]`. It has one value for each group of each row.

    A tensor of a single value, which holds for all groups, gets the shape `[1, 1]`.

    Raises:
        ModelError: if the tensor has another number of values.
    """
    if tensor.rows * tensor.columns == 1:
        return replace(tensor, shape=(1, 1))
    if tensor.rows * tensor.columns != rows * of_groups or tensor.columns not in (of_groups, rows):
        raise misfit(source, tensor, (rows, of_groups))
    return replace(tensor, shape=(rows, of_groups))


def _order(source: Source, name: str, columns: int, group: int) -> npt.NDArray[np.int32] | None:
    """Return the number of the group of each column, or None if each group is a run of neighbouring columns."""
    if name not in source.tensors:
        return None
    numbers = read_all(source, tensor_of(source, name, (columns,)))
    if (numbers == -1).any() or (numbers == np.arange(columns) // group).all():  # -1: there is no order
        return None
    if numbers.min() < 0 or numbers.max() >= -(-columns // group):
        raise ModelError(f"{source.label}: tensor {name} names groups that do not exist; download the model again")
    return numbers.astype(np.int32)


def compressed(config: Config) -> Compressed:
    """Return the settings of a `quantization_config` of compressed-tensors.

    Raises:
        ModelError: if a setting is unknown or not supported.
    """
    check_fields(config, (*_CONFIG, "sparsity_config", "transform_config"), "its quantization_config")
    one_of(config, "quantization_status", ("compressed", "frozen"), "compressed")
    one_of(field(config, "sparsity_config", dict, {}), "format", _NO_SPARSITY)
    check_fields(field(config, "transform_config", dict, {}), (), "transform_config")
    groups = list(field(config, "config_groups", dict, {}).values())
    if not groups or not all(isinstance(group, Mapping) for group in groups):
        raise unsupported("compressed-tensors without config_groups")
    schemes = tuple((_targets(group), _scheme(config, group)) for group in groups)
    notes: tuple[str, ...] = (ACTIVATIONS,) if any(group.get("input_activations") for group in groups) else ()
    notes += (KEYS_AND_VALUES,) if config.get("kv_cache_scheme") else ()
    return Compressed(schemes, names_in(config, "ignore"), notes, _fp8(groups, schemes))


def _targets(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the targets of a group: names, patterns, or `Linear`. Refuse patterns that are not supported."""
    check_fields(group, _SCHEME, "a group of config_groups")
    targets = names_in(group, "targets")
    for target in targets:
        if target.startswith("re:"):
            matches(target[3:], "")  # refuses patterns that are not supported
        elif target != "Linear" and "." not in target and target != "lm_head":
            raise unsupported(f"compressed-tensors, the target {target[:80]!r}")
    return targets


def _scheme(config: Config, group: Mapping[str, Any]) -> Scheme:
    weights = field(group, "weights", Mapping, None)
    format = group.get("format") or config.get("format")
    if weights is None or format not in _FORMATS:
        raise unsupported(f"compressed-tensors, {str(format)[:80]}")
    check_fields(weights, _WEIGHTS, "the weights of a group")
    kind, widths = _FORMATS[format]
    if format == "naive-quantized" and weights.get("type") == "int":
        kind, widths = _FORMATS["int-quantized"]
    one_of(weights, "type", (kind,), "int")
    one_of(weights, "dynamic", (False,), False)
    one_of(weights, "actorder", ("group", "dynamic", "weight", "static", True, False, None))
    bits = one_of(weights, "num_bits", widths, 8)
    symmetric = field(weights, "symmetric", bool, True)
    if format.startswith(("nvfp4", "mxfp4")):
        wanted = ("NVFP4", 16) if format.startswith("nvfp4") else ("MXFP4", 32)
        one_of(weights, "group_size", (wanted[1],), wanted[1])
        one_of(weights, "symmetric", (True,), True)
        return Scheme(wanted[0], 4, wanted[1])
    if kind == "float":
        one_of(weights, "symmetric", (True,), True)
        one_of(weights, "strategy", ("tensor", "channel", "block"), "tensor")
        return Scheme("FP8", 8)
    strategy = one_of(
        weights, "strategy", ("tensor", "channel", "group"), "group" if weights.get("group_size") else "tensor"
    )
    reordered = weights.get("actorder") in ("group", "dynamic", True)
    size = group_size(weights) if strategy == "group" else 0
    return Scheme(f"{'INT' if symmetric else 'UINT'}{bits}", bits, size, reordered)


def _fp8(groups: list[Mapping[str, Any]], schemes: tuple[tuple[tuple[str, ...], Scheme], ...]) -> Fp8Scales | None:
    """Return the layout of the scales of FP8 weights; None if no scheme uses FP8."""
    of_fp8 = [group["weights"] for group, (_, scheme) in zip(groups, schemes, strict=True) if scheme.kind == "FP8"]
    blocks = {str(block): block for weights in of_fp8 if (block := weights.get("block_structure"))}
    if len(blocks) > 1:
        raise unsupported("compressed-tensors, FP8 blocks of several sizes")
    return Fp8Scales.of_block(*blocks.values()) if of_fp8 else None


def _is_target(target: str, module: str) -> bool:
    return matches(target[3:], module) if target.startswith("re:") else target == module
