"""Rotary position embeddings of a GGUF file, derived from `rope.*` and tensors of factors in the way of llama.cpp."""

import math
from dataclasses import replace

import numpy as np

from tpi.errors import ModelError
from tpi.families import rope
from tpi.families.base import Fields, float_field, int_field
from tpi.sources.base import Source, read_vector

_TYPES = ("none", "linear", "yarn", "longrope")
FREQS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"


def from_metadata(fields: Fields, head_dim: int, context: int, source: Source) -> rope.Rope:
    """Return the frequencies of the model.

    Scaling is linear if the file names no type; without a factor there is no scaling. Before the scaling, frequencies
    are divided by the factors in the file's tensors, if there are any (Llama 3.1, Phi-3).

    Raises:
        ModelError: if the type of scaling is not known, or a number is out of range.
    """
    kind, factor = _kind(fields), factor_of(fields)
    theta = float_field(fields, "rope.freq_base", 10000.0)
    base = rope.frequencies(theta, int_field(fields, "rope.dimension_count", head_dim))
    ramp = _extrapolation(fields, kind)
    attention = _attention(fields, factor, ramp)
    original = int_field(fields, "rope.scaling.original_context_length", context) or context
    kept = np.float32(ramp) * _kept(fields, len(base), theta, original) if ramp else np.float32(0)

    def resolved(name: str) -> rope.Rope:
        """Return the scaled frequencies.

        Unless `name` is empty, they are first divided by the factors in that tensor.
        """
        divided = rope.divided(base, read_vector(source, name)) if name else rope.plain(base)
        frequencies = np.asarray(divided.inv_freq, np.float32)
        scaled = frequencies / np.float32(factor) * (1 - kept) + frequencies * kept
        return rope.plain(np.asarray(scaled, np.float32), attention)

    if SHORT in source.tensors or LONG in source.tensors:
        return replace(resolved(SHORT), long=resolved(LONG).inv_freq, original=min(original, context))
    return resolved(FREQS if FREQS in source.tensors else "")


def _kind(fields: Fields) -> str:
    kind = fields.get("rope.scaling.type", "linear")
    if kind not in _TYPES:
        raise ModelError(f"rope.scaling.type is {kind!r}; supported are {', '.join(_TYPES)}")
    return str(kind)


def factor_of(fields: Fields) -> float:
    """Return the factor by which positions are divided; 1 without scaling.

    The older key `rope.scale_linear` is used if `rope.scaling.factor` is missing. A factor of 0 means 1.

    Raises:
        ModelError: if the type of scaling is not known, or the factor is not a positive number.
    """
    older = float_field(fields, "rope.scale_linear", 0.0)
    factor = float_field(fields, "rope.scaling.factor", older) or 1.0
    if not (math.isfinite(factor) and factor > 0):
        raise ModelError(f"rope.scaling.factor is {factor}; a positive number is expected")
    return 1.0 if _kind(fields) == "none" else factor


def extrapolates(fields: Fields) -> bool:
    """Return True if fast frequencies are left unscaled, as in YaRN."""
    return _extrapolation(fields, _kind(fields)) > 0


def _extrapolation(fields: Fields, kind: object) -> float:
    """Return the weight of YaRN's ramp between unscaled and scaled frequencies; 0 leaves all of them scaled.

    The weight is the file's, or else 1 for YaRN and 0 for other types of scaling.
    """
    given = float_field(fields, "rope.scaling.yarn_ext_factor", -1.0)
    return given if given >= 0 else float(kind == "yarn")


def _attention(fields: Fields, factor: float, ramp: float) -> float:
    """Return the factor by which cosine and sine are multiplied. `ramp` is the weight of YaRN's ramp.

    Raises:
        ModelError: if the file has another `yarn_attn_factor` than YaRN's own factor, since programs interpret it
            differently.
    """
    given = float_field(fields, "rope.scaling.attn_factor", 1.0)
    own = float_field(fields, "rope.scaling.yarn_attn_factor", 1.0)
    weight = float_field(fields, "rope.scaling.yarn_log_multiplier", 0.0)
    if not ramp:
        return given * own
    usual = _sharpened(factor, 1.0) / _sharpened(factor, weight)
    if own != 1 and not math.isclose(own, usual, rel_tol=1e-6):
        raise ModelError(
            f"rope.scaling.yarn_attn_factor is {own} with YaRN, which programs interpret differently; convert the "
            "model without it"
        )
    return given * usual


def _sharpened(factor: float, weight: float) -> float:
    """Return YaRN's factor on cosine and sine (Peng et al., 2023, equation 22), its logarithm weighted by `weight`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _kept(fields: Fields, pairs: int, theta: float, original: int) -> rope.F32:
    """Return the share of each pair's frequency that YaRN leaves unscaled: 1 for fast pairs down to 0 for slow ones.

    The result is float32 `[pairs]`. `theta` is the rotary base, `original` the original context in tokens.

    Raises:
        ModelError: if a parameter is out of range.
    """
    fast = float_field(fields, "rope.scaling.yarn_beta_fast", 32.0)
    slow = float_field(fields, "rope.scaling.yarn_beta_slow", 1.0)
    if not (fast > 0 and slow > 0 and math.isfinite(fast) and math.isfinite(slow) and theta > 1 and original > 0):
        raise ModelError(f"rope scaling yarn from {slow} to {fast} turns on a base of {theta} is not possible")

    def dimension(turns: float) -> float:
        return 2 * pairs * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), 2 * pairs - 1)
    ramp = (np.arange(pairs, dtype=np.float32) - np.float32(first)) / np.float32(max(0.001, last - first))
    return np.asarray(1 - np.clip(ramp, 0, 1), np.float32)
