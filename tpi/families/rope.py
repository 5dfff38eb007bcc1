"""Rotary position frequencies, resolved when a model is packed. Computed in float32, as the models were trained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.families.base import Fields, number, whole

F32 = npt.NDArray[np.float32]


_LEAST_BASE, _LARGEST_BASE = 1e-30, 1e30  # far beyond any model's, and their powers still fit float32


@dataclass(frozen=True)
class Rope:
    """Frequencies in radians per token, and the factor on cos and sin. `long` are the frequencies for a context of more
    than `original` tokens, if they differ."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0
    long: tuple[float, ...] = ()
    original: int = 0

    def fields(self) -> dict[str, Any]:
        """The ModelConfig fields that this sets."""
        return {
            "inv_freq": self.inv_freq,
            "rope_scale": self.scale,
            "long_inv_freq": self.long,
            "original_context": self.original,
        }


def frequencies(theta: float, rotary: int) -> F32:
    """theta ** (-2j / rotary) for j < rotary / 2 (Su et al., RoFormer, section 3.2.2)."""
    if not _LEAST_BASE < theta < _LARGEST_BASE or rotary < 0 or rotary % 2 or rotary > 1 << 12:
        raise ModelError(f"a rotary embedding of base {theta} over {rotary} values is not supported")
    exponents = np.arange(0, rotary, 2, dtype=np.float32) / np.float32(rotary)
    return np.asarray(np.float32(1) / np.float32(theta) ** exponents, np.float32)


def plain(inv_freq: F32, scale: float = 1.0) -> Rope:
    """A Rope from an array."""
    return Rope(tuple(float(value) for value in inv_freq), scale)


def scaled(kind: object, base: F32, theta: float, scaling: Fields, context: int) -> Rope:
    """Frequencies `base` of base `theta` scaled in the way that `kind` names.

    Raises:
        ModelError: if it is not supported; it lists those that are. If float32 does not hold what comes of its numbers.
    """
    try:
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            return _scaled(kind, base, theta, scaling, context)
    except (ArithmeticError, ValueError) as error:
        raise ModelError(f"rope scaling {kind!r} has impossible numbers ({error}); download the model again") from error


def _scaled(kind: object, base: F32, theta: float, scaling: Fields, context: int) -> Rope:
    if kind in ("default", "dynamic"):  # dynamic scaling begins beyond the context that is used here
        return plain(base)
    if kind == "linear":
        return plain(base / np.float32(number(scaling, "factor")))
    if kind == "llama3":
        return plain(llama3(base, scaling, context))
    if kind == "yarn":
        return yarn(base, theta, scaling, context)
    if kind in ("longrope", "su"):
        return longrope(base, scaling, context)
    raise ModelError(
        f"rope scaling {kind!r} is not supported; supported: default, linear, dynamic, llama3, yarn, longrope"
    )


def llama3(base: F32, scaling: Fields, context: int) -> F32:
    """Llama 3.1: long wavelengths divided by a factor, short ones kept, a linear blend between."""
    factor, low, high = (number(scaling, f"{name}factor") for name in ("", "low_freq_", "high_freq_"))
    old = number(scaling, "original_max_position_embeddings", context)
    if not 0 < low < high or factor <= 0 or old <= 0:
        raise ModelError(f"rope scaling llama3 with factors {factor}, {low}, {high} is not possible")
    turns = np.float32(old) * base / np.float32(2 * math.pi)
    blend = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    return np.asarray((1 - blend) * base / np.float32(factor) + blend * base, np.float32)


def yarn(base: F32, theta: float, scaling: Fields, context: int) -> Rope:
    """YaRN (Peng et al., 2023, section 3): interpolate slow dimensions, keep fast ones, and sharpen attention."""
    old = number(scaling, "original_max_position_embeddings", context)
    factor, rotary = number(scaling, "factor", context / old if old > 0 else 0), 2 * len(base)
    if factor <= 0 or old <= 0 or theta <= 1:
        raise ModelError(f"rope scaling yarn with a factor of {factor} is not possible")

    def dimension(turns: float) -> float:
        """The pair that turns this often over the original context."""
        return rotary * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))

    turns = [number(scaling, name, 0) or default for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))]
    if min(turns) <= 0:
        raise ModelError(f"rope scaling yarn between {turns[0]} and {turns[1]} turns is not possible")
    first, last = map(dimension, turns)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary - 1)
    width = last - first or 0.001
    ramp = np.clip((np.arange(rotary // 2, dtype=np.float32) - first) / width, 0, 1)
    inv_freq = base / np.float32(factor) * ramp + base * (1 - ramp)
    return plain(inv_freq.astype(np.float32), _yarn_scale(factor, scaling))


def _yarn_scale(factor: float, scaling: Fields) -> float:
    def grow(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grow(number(scaling, "mscale")) / grow(number(scaling, "mscale_all_dim"))
    return grow(1.0)


def longrope(base: F32, fields: Fields, context: int) -> Rope:
    """LongRoPE (Phi-3): short factors within the original context, long ones beyond it. Which of them are used is
    decided by the context that is asked for (`ModelConfig.for_context`); without long ones it ends there."""
    old = whole(fields, "original_max_position_embeddings", context)
    stretch = number(fields, "factor", context / max(old, 1))
    if stretch > 1 and old <= 1:
        raise ModelError(f"rope scaling longrope from a context of {old} is not possible")
    scale = math.sqrt(1 + math.log(stretch) / math.log(old)) if stretch > 1 else 1.0
    rope = divided(base, fields.get("short_factor"), number(fields, "attention_factor", scale))
    long = divided(base, fields.get("long_factor")).inv_freq
    return replace(rope, long=long, original=max(old, 1))


def divided(base: F32, factors: Sequence[float] | F32 | None, scale: float = 1.0) -> Rope:
    """Frequencies divided by one factor each.

    Raises:
        ModelError: if there is not one positive factor for each frequency.
    """
    try:
        divisors = np.asarray(factors, np.float32)
    except (TypeError, ValueError):
        divisors = np.zeros(0, np.float32)
    if divisors.shape != base.shape or not np.all(divisors > 0):
        raise ModelError(f"rope scaling needs {len(base)} positive factors; the model does not have them")
    return plain(base / divisors, scale)
