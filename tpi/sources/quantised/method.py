"""Schemes of quantised modules, as a configuration describes them, and how a module's tensors are joined."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Protocol

from tpi.errors import ModelError
from tpi.sources.base import Source, SourceTensor
from tpi.sources.elements import Element
from tpi.sources.fp8 import FP8, Fp8Scales
from tpi.sources.quantised.groups import NVFP4
from tpi.sources.quantised.matrices import MXFP4, Joined, element_of

_LONGEST = 300  # characters of a pattern
_LOOPS = re.compile(r"[*+{]")
_NESTED = re.compile(r"\)\s*[*+{]|[*+}][*+{]|\\[1-9]|\(\?")  # patterns that could take exponential time, and others

Config = Mapping[str, Any]  # a quantization_config
WHOLE_ROW = 0  # as a group


@dataclass(frozen=True)
class Scheme:
    """How the weights of a module are quantised.

    Attributes:
        kind: kind of the groups (`tpi.sources.quantised.groups`), or FP8 or MXFP4.
        bits: bits of a code.
        group: columns that share a scale, or `WHOLE_ROW`.
        reordered: the columns of a group need not be neighbours.
    """

    kind: str
    bits: int
    group: int = WHOLE_ROW
    reordered: bool = False

    @property
    def symmetric(self) -> bool:
        """True if groups have no zero points."""
        return self.kind.startswith("INT")

    def element(self, columns: int) -> Element:
        """Return the coding of a matrix whose rows have `columns` values."""
        if self.kind in ("FP8", "MXFP4"):
            return FP8 if self.kind == "FP8" else MXFP4
        group = self.group if self.group and self.kind != NVFP4 else columns  # a group of NVFP4 is half of 32
        return element_of(self.kind, columns, group, self.reordered)


class Method(Protocol):
    """A way to quantise models, with the settings of one model."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the method, for the user."""

    @property
    def fp8(self) -> Fp8Scales | None:
        """The layout of the scales of FP8 weights; None if the model has no such weights."""

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a linear layer or an embedding by its name; None if it is not quantised."""

    def join(self, source: Source) -> Iterator[tuple[list[Joined], tuple[str, ...]]]:
        """Yield, for each quantised module of `source`, its matrices and the names of the tensors they are made from.

        Raises:
            ModelError: if a tensor is missing, has a shape that does not fit, or is not described by the configuration.
        """


def unsupported(reason: str) -> ModelError:
    """Return the error for weights that are quantised in a way that is not supported."""
    return ModelError(
        f"its weights are quantised in a way that is not supported ({reason}); give the original, or a GGUF of it"
    )


def check_fields(config: Config, known: Collection[str], what: str) -> None:
    """Raise a ModelError that names the first field of `config` that is not `known` and has a value, if there is one.

    `what` names the object in the message.
    """
    for name, value in config.items():
        if name not in known and value not in (None, {}, []):
            raise unsupported(f"{what} has the field {str(name)[:80]!r}, which is not known")


def field(config: Config, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    """Return a field of `config`, or `default` if it is missing or null.

    Raises:
        ModelError: if the field's value is not of the type `kind`.
    """
    value = config.get(name)
    if value is None:
        return default
    exact = isinstance(value, kind) and (bool in (kind if isinstance(kind, tuple) else (kind,)) or value is not True)
    if not exact or (value is False and kind is int):
        raise unsupported(f"{name} is {str(value)[:80]!r}")
    return value


def one_of(config: Config, name: str, allowed: Collection[Any], default: Any = None) -> Any:
    """Return a field of `config`, or `default` if it is missing or null.

    Raises:
        ModelError: if the field's value is not one of `allowed`.
    """
    value = config.get(name)
    value = default if value is None else value
    if not any(value == each and type(value) is type(each) for each in allowed):
        raise unsupported(f"{name} is {str(value)[:80]!r}")
    return value


def group_size(config: Config, name: str = "group_size", default: int | None = None) -> int:
    """Return the size of a group, or `WHOLE_ROW` for -1.

    Raises:
        ModelError: if it is missing without a default, or not a positive whole number.
    """
    size = field(config, name, int, default)
    if size is None or size == 0 or size < -1 or size > 1 << 24:
        raise unsupported(f"{name} is {size}")
    return WHOLE_ROW if size == -1 else int(size)


def names_in(config: Config, name: str) -> tuple[str, ...]:
    """Return the list of strings in a field of `config`; empty if it is missing.

    Raises:
        ModelError: if it is not a list of strings.
    """
    value = field(config, name, list, [])
    if not all(isinstance(each, str) for each in value):
        raise unsupported(f"{name} is not a list of names")
    return tuple(value)


def matches(pattern: str, module: str) -> bool:
    """Return True if the regular expression `pattern` matches the start of the name `module`.

    Raises:
        ModelError: if it is not valid, or matching it could take very long.
    """
    return _compiled(pattern).match(module[:_LONGEST]) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> "re.Pattern[str]":
    if len(pattern) > _LONGEST or _NESTED.search(pattern) or len(_LOOPS.findall(pattern)) > 4:
        raise unsupported(f"the pattern {pattern[:80]!r} is too complex")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise unsupported(f"{pattern[:80]!r} is not a valid pattern") from error


def is_left_out(module: str, listed: Collection[str]) -> bool:
    """Return True if a list such as `modules_to_not_convert` contains a module.

    An entry is a name, its beginning or end, a part of it between dots, or has wildcards.
    """
    dotted = f".{module}."
    return any(
        f".{entry.strip('.')}." in dotted or module.startswith(entry) or fnmatchcase(module, entry) for entry in listed
    )


def tensor_of(source: Source, name: str, shape: tuple[int, ...] | None = None) -> SourceTensor:
    """Return the tensor `name`, which belongs to a quantised module.

    Raises:
        ModelError: if it is missing or its shape is not `shape`.
    """
    tensor = source.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{source.label} has no tensor {name} for its quantised weights; download the model again")
    if shape is not None and tensor.shape != shape:
        raise misfit(source, tensor, shape)
    return tensor


def misfit(source: Source, tensor: SourceTensor, shape: Collection[int]) -> ModelError:
    """Return the error for a tensor of a quantised module that should have another shape."""
    return ModelError(
        f"{source.label}: tensor {tensor.name} has shape {list(tensor.shape)}, but its quantised weights ask for "
        f"{list(shape)}; download the model again"
    )
