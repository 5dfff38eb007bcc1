"""Frequencies of rotary position embeddings, computed when a model is packed: in float32, as in training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.errors import ModelError
from tpi.families.base import Fields, float_field, int_field

F32 = npt.NDArray[np.float32]


_LEAST_BASE, _LARGEST_BASE = 1e-30, 1e30  # far beyond any model's base; powers of these still fit float32


@dataclass(frozen=True)
class Rope:
    """The frequencies of a rotary position embedding."""

    inv_freq: tuple[float, ...]  # radians per token, for each pair of values
    scale: float = 1.0  # factor on cos and sin
    long: tuple[float, ...] = ()  # frequencies for a context of more than `original` tokens; empty: `inv_freq`
    original: int = 0

    def fields(self) -> dict[str, Any]:
        """Return these settings as fields of a ModelConfig."""
        return {
            "inv_freq": self.inv_freq,
            "rope_scale": self.scale,
            "long_inv_freq": self.long,
            "original_context": self.original,
        }


def frequencies(theta: float, rotary: int) -> F32:
    """Return theta ** (-2j / rotary) for j < rotary / 2, float32 `[rotary / 2]` (Su et al., RoFormer, section 3.2.2).

    Raises:
        ModelError: if `theta` or `rotary` is out of range, or `rotary` is odd.
    """
    if not _LEAST_BASE < theta < _LARGEST_BASE or rotary < 0 or rotary % 2 or rotary > 1 << 12:
        raise ModelError(f"a rotary embedding of base {theta} over {rotary} values is not supported")
    exponents = np.arange(0, rotary, 2, dtype=np.float32) / np.float32(rotary)
    return np.asarray(np.float32(1) / np.float32(theta) ** exponents, np.float32)


def plain(inv_freq: F32, scale: float = 1.0) -> Rope:
    """Create a Rope from an array of frequencies, in radians per token, and a factor on cosine and sine."""
    return Rope(tuple(float(value) for value in inv_freq), scale)


def scaled(kind: object, base: F32, theta: float, scaling: Fields, context: int) -> Rope:
    """Return the rotary frequencies `base`, which were computed from `theta`, after scaling.

    Args:
        kind: the kind of scaling, as a config.json names it: default, linear, dynamic, llama3, yarn, longrope or su.
        base: float32 `[pairs]`, in radians per token.
        theta: the base that the frequencies were computed from.
        scaling: the parameters of the scaling.
        context: the model's context, in tokens.

    Raises:
        ModelError: if the kind is not supported, a parameter is missing or out of range, or float32 overflows.
    """
    try:
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            return _scaled(kind, base, theta, scaling, context)
    except (ArithmeticError, ValueError) as error:
        raise ModelError(f"rope scaling {kind!r} has impossible numbers ({error}); download the model again") from error


def _scaled(kind: object, base: F32, theta: float, scaling: Fields, context: int) -> Rope:
    if kind in ("default", "dynamic"):  # dynamic scaling begins beyond the model's context, which TPI never exceeds
        return plain(base)
    if kind == "linear":
        return plain(base / np.float32(float_field(scaling, "factor")))
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
    """Return frequencies scaled as in Llama 3.1.

    Frequencies of long wavelength are divided by a factor, and those of short wavelength are unchanged. Between them
    the two are blended linearly.

    Raises:
        ModelError: if a parameter is missing or out of range.
    """
    factor, low, high = (float_field(scaling, f"{name}factor") for name in ("", "low_freq_", "high_freq_"))
    old = float_field(scaling, "original_max_position_embeddings", context)
    if not 0 < low < high or factor <= 0 or old <= 0:
        raise ModelError(f"rope scaling llama3 with factors {factor}, {low}, {high} is not possible")
    turns = np.float32(old) * base / np.float32(2 * math.pi)
    blend = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    return np.asarray((1 - blend) * base / np.float32(factor) + blend * base, np.float32)


def yarn(base: F32, theta: float, scaling: Fields, context: int) -> Rope:
    """Return frequencies scaled by YaRN (Peng et al., 2023, section 3).

    Slow dimensions are interpolated, fast ones are unchanged, and attention is sharpened by a factor on cos and sin.

    Raises:
        ModelError: if a parameter is missing or out of range.
    """
    old = float_field(scaling, "original_max_position_embeddings", context)
    factor, rotary = float_field(scaling, "factor", context / old if old > 0 else 0), 2 * len(base)
    if factor <= 0 or old <= 0 or theta <= 1:
        raise ModelError(f"rope scaling yarn with a factor of {factor} is not possible")

    def dimension(turns: float) -> float:
        """Return the index (a real number) of the pair that turns `turns` times over the original context."""
        return rotary * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))

    turns = [float_field(scaling, name, 0) or default for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))]
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
        return float_field(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grow(float_field(scaling, "mscale")) / grow(float_field(scaling, "mscale_all_dim"))
    return grow(1.0)


def longrope(base: F32, fields: Fields, context: int) -> Rope:
    """Return frequencies scaled by LongRoPE (Phi-3): by short factors within the original context, by long ones beyond.

    `ModelConfig.for_context` chooses between them by the requested context.

    Raises:
        ModelError: if the short or long factors are missing, or a parameter is out of range.
    """
    old = int_field(fields, "original_max_position_embeddings", context)
    stretch = float_field(fields, "factor", context / max(old, 1))
    if stretch > 1 and old <= 1:
        raise ModelError(f"rope scaling longrope from a context of {old} is not possible")
    scale = math.sqrt(1 + math.log(stretch) / math.log(old)) if stretch > 1 else 1.0
    rope = divided(base, fields.get("short_factor"), float_field(fields, "attention_factor", scale))
    long = divided(base, fields.get("long_factor")).inv_freq
    return replace(rope, long=long, original=max(old, 1))


def divided(base: F32, factors: Sequence[float] | F32 | None, scale: float = 1.0) -> Rope:
    """Return a Rope with each frequency of `base` divided by its own factor; `scale` is the factor on cosine and sine.

    Raises:
        ModelError: unless there are as many positive factors as frequencies.
    """
    try:
        divisors = np.asarray(factors, np.float32)
    except (TypeError, ValueError):
        divisors = np.zeros(0, np.float32)
    if divisors.shape != base.shape or not np.all(divisors > 0):
        raise ModelError(f"rope scaling needs {len(base)} positive factors; the model does not have them")
    return plain(base / divisors, scale)
