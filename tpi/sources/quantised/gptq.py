"""GPTQ and AWQ: codes, zero points and scales of the transposed matrix, in int32 words.

GPTQ's `M.qweight` is `[inputs * bits / 32, outputs]`, with the codes of each column in its words. `M.qzeros` is
`[groups, outputs * bits / 32]`, with the zero points of each row in its words, less 1 in version 1 of the format.
`M.scales` is `[groups, outputs]`. `M.g_idx` is the group of each input. AWQ's `M.qweight` is `[inputs, outputs / 8]`,
and 8 codes lie in a word in the order that its kernels want. A weight is `(code - zero) * scale`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.sources.base import Source, SourceTensor
from tpi.sources.fp8 import Fp8Scales
from tpi.sources.quantised.fields import Factors, Packed, read_all
from tpi.sources.quantised.matrices import Integers, Joined
from tpi.sources.quantised.method import (
    Config,
    Scheme,
    check_fields,
    field,
    group_size,
    is_left_out,
    matches,
    misfit,
    names_in,
    one_of,
    tensor_of,
    unsupported,
)

# Fields that say how the weights were found, or which kernels to run. They do not change what the files mean.
_MAKING = (
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path",
    "model_file_base_name", "meta", "tokenizer", "dataset", "backend", "model_seqlen", "block_name_to_quantize",
    "module_name_preceding_first_block", "batch_size", "pad_token_id", "max_input_length", "cache_block_outputs",
    "use_cuda_fp16", "use_exllama", "exllama_config", "disable_exllama", "act_group_aware", "do_fuse",
    "fuse_max_seq_len", "modules_to_fuse", "quant_method", "method", "mse",
)  # fmt: skip
_GPTQ = (
    "bits", "group_size", "desc_act", "sym", "checkpoint_format", "format", "is_marlin_format", "lm_head", "dynamic",
    "pack_dtype", "modules_in_block_to_quantize",
)  # fmt: skip
_AWQ = (
    "bits", "w_bit", "group_size", "q_group_size", "version", "format", "zero_point", "modules_to_not_convert",
    "pack_dtype", "desc_act", "sym", "modules_in_block_to_quantize",
)  # fmt: skip
_QWEIGHT = ".qweight"
_WORD = 32  # bits


@dataclass(frozen=True)
class Gptq:
    """The settings of a GPTQ or AWQ model. `overrides` has pairs of a pattern of module names and a scheme, or None."""

    usual: Scheme
    awq: bool
    less: int  # added to the zero points of the files: 1 in version 1 of GPTQ's format, else 0
    head: bool = False
    left_out: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    overrides: tuple[tuple[str, Scheme | None], ...] = ()
    notes: tuple[str, ...] = ()
    fp8: Fp8Scales | None = None

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a module: that of the first pattern that matches its name, or the default one."""
        for pattern, scheme in self.overrides:
            if matches(pattern, module):
                return scheme
        embedding = "embed" in module or (module.endswith("lm_head") and not self.head)
        other = self.only and not any(module.endswith(name) for name in self.only)
        return None if embedding or other or is_left_out(module, self.left_out) else self.usual

    def join(self, source: Source) -> Iterator[tuple[list[Joined], tuple[str, ...]]]:
        """Yield each quantised matrix and the names of its tensors.

        Raises:
            ModelError: if a tensor is missing, or has a shape that does not fit.
        """
        for name in [name for name in source.tensors if name.endswith(_QWEIGHT)]:
            module = name.removesuffix(_QWEIGHT)
            yield self._matrix(source, module, self._chosen(module))

    def _chosen(self, module: str) -> Scheme:
        """Return the scheme of a module that has codes, even if `modules_to_not_convert` names it.

        Refuse a module that `dynamic` excludes.
        """
        found = next((scheme for pattern, scheme in self.overrides if matches(pattern, module)), self.usual)
        if found is None:
            raise unsupported(f"{module} has codes, but the field dynamic of its configuration excludes it")
        return found

    def _matrix(self, source: Source, module: str, scheme: Scheme) -> tuple[list[Joined], tuple[str, ...]]:
        words, scales = (tensor_of(source, module + suffix) for suffix in (_QWEIGHT, ".scales"))
        if words.element.name not in ("I32", "U32") or len(words.shape) != 2 or len(scales.shape) != 2:
            raise misfit(source, words, (0, 0))
        per_word = _WORD // scheme.bits
        inputs, outputs = words.shape
        if self.awq:
            outputs *= per_word
        else:
            inputs = inputs * _WORD // scheme.bits
        of_groups = -(-inputs // (scheme.group or inputs))
        tensor_of(source, scales.name, (of_groups, outputs))
        order = self._order(source, module, inputs, of_groups, scheme)
        scheme = replace(scheme, reordered=order is not None)
        zeros = self._zeros(source, module, (of_groups, -(-outputs * scheme.bits // _WORD)), scheme)
        shape = (outputs, inputs)
        tensor = SourceTensor(f"{module}.weight", shape, scheme.element(inputs), words.path, words.offset)
        codes = Packed(words, scheme.bits, "row" if self.awq else "column", self.awq)
        matrix = Integers(
            tensor, codes, Factors(scales, transposed=True), zeros, None, scheme.bits, scheme.group or inputs, True,
            order,
        )  # fmt: skip
        return [matrix], tuple(module + suffix for suffix in (_QWEIGHT, ".scales", ".qzeros", ".g_idx"))

    def _zeros(self, source: Source, module: str, shape: tuple[int, int], scheme: Scheme) -> Packed | None:
        name = f"{module}.qzeros"
        if self.awq and scheme.symmetric and name not in source.tensors:
            return None
        return Packed(tensor_of(source, name, shape), scheme.bits, "row", self.awq, self.less)

    def _order(
        self, source: Source, module: str, inputs: int, of_groups: int, scheme: Scheme
    ) -> npt.NDArray[np.int32] | None:
        """Return the number of the group of each input, or None if each group is a run of neighbouring inputs."""
        name = f"{module}.g_idx"
        if name not in source.tensors:
            return None
        numbers = read_all(source, tensor_of(source, name, (inputs,)))
        if (numbers == np.arange(inputs) // (scheme.group or inputs)).all():
            return None
        if numbers.min() < 0 or numbers.max() >= of_groups:
            raise ModelError(f"{source.label}: tensor {name} names groups that do not exist; download the model again")
        return numbers.astype(np.int32)


def gptq(config: Config) -> Gptq:
    """Return the settings of a `quantization_config` of GPTQ.

    Raises:
        ModelError: if a setting is unknown or not supported.
    """
    check_fields(config, (*_MAKING, *_GPTQ, "rotation", "activation"), "its quantization_config")
    for name in ("rotation", "activation"):
        one_of(config, name, (None,))
    one_of(config, "is_marlin_format", (False,), False)
    one_of(config, "pack_dtype", ("int32",), "int32")
    found = one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), config.get("format") or "gptq")
    one_of(config, "format", ("gptq", "gptq_v2"), found)
    usual = _scheme(config)
    only = tuple(name for names in field(config, "modules_in_block_to_quantize", list, []) for name in _strings(names))
    overrides = tuple(_override(config, *item) for item in field(config, "dynamic", dict, {}).items())
    head, less = field(config, "lm_head", bool, False), int(found == "gptq")
    return Gptq(usual, awq=False, less=less, head=head, only=only, overrides=overrides)


def awq(config: Config) -> Gptq:
    """Return the settings of a `quantization_config` of AWQ, packed for matrix products (`gemm`).

    Raises:
        ModelError: if a setting is unknown or not supported.
    """
    check_fields(config, (*_MAKING, *_AWQ), "its quantization_config")
    one_of({"version": str(config.get("version") or config.get("format") or "gemm").lower()}, "version", ("gemm",))
    one_of(config, "pack_dtype", ("int32",), "int32")
    if config.get("backend") == "llm-awq":
        raise unsupported("awq, backend is 'llm-awq'")
    one_of({"bits": config.get("bits", config.get("w_bit"))}, "bits", (4,), 4)
    group = group_size({"group_size": config.get("group_size", config.get("q_group_size"))}, default=128)
    kind = "UINT4" if field(config, "zero_point", bool, True) else "INT4"
    return Gptq(Scheme(kind, 4, group), awq=True, less=0, left_out=names_in(config, "modules_to_not_convert"))


def _scheme(config: Config) -> Scheme:
    bits = one_of(config, "bits", (2, 3, 4, 8))
    kind = "INT" if field(config, "sym", bool, False) else "UINT"
    return Scheme(f"{kind}{bits}", bits, group_size(config, default=128), field(config, "desc_act", bool, False))


def _override(config: Config, pattern: Any, settings: Any) -> tuple[str, Scheme | None]:
    """Return the pattern and the scheme of an entry of `dynamic`. An entry that begins with `-:` excludes modules."""
    if not isinstance(pattern, str) or not isinstance(settings, Mapping):
        raise unsupported("dynamic has an entry that is not an object")
    matches(text := pattern.removeprefix("+:").removeprefix("-:"), "")  # refuses patterns that are not supported
    if pattern.startswith("-:"):
        return text, None
    check_fields(settings, ("bits", "group_size", "sym", "desc_act", *_MAKING), "dynamic")
    return text, _scheme({**config, **settings})


def _strings(names: Any) -> tuple[str, ...]:
    return names_in({"modules_in_block_to_quantize": names}, "modules_in_block_to_quantize")
