"""Rotary embeddings for random configurations: objects for rope_parameters and rope_scaling."""

import random
from collections.abc import Callable
from typing import Any

PAIRS = 64  # at most

Value = Callable[[random.Random], Any]


def one_of(*values: Any) -> Value:
    return lambda rng: rng.choice(values)


def rope(rng: random.Random, kind: str = "") -> dict[str, Any]:
    """Return an object for rope_parameters or rope_scaling; `fit` later gives LongRoPE its number of factors."""
    kind = kind or rng.choice(["default", "default", "linear", "dynamic", "llama3", "yarn", "longrope"])
    found: dict[str, Any] = {rng.choice(["rope_type", "rope_type", "type"]): kind}
    if kind != "default":
        found["factor"] = rng.choice([1.5, 2.0, 8.0])
    if kind == "llama3":
        found |= {"low_freq_factor": rng.choice([0.5, 1.0]), "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "longrope":
        found |= {f"{side}_factor": [rng.uniform(1, 4) for _ in range(PAIRS)] for side in ("short", "long")}
    maybe: dict[str, Value] = {
        "rope_theta": one_of(100.0, 10000.0, 500000),
        "original_max_position_embeddings": one_of(8, 16, 40),
        "attention_factor": one_of(None, 1.3),
        "partial_rotary_factor": one_of(1.0),
    }
    if kind == "yarn":
        maybe |= {"beta_fast": one_of(8, None), "beta_slow": one_of(1.5, None), "truncate": one_of(True, False),
                  "mscale": one_of(0.7, 0), "mscale_all_dim": one_of(1.0, 0.5)}  # fmt: skip
    return found | {name: value(rng) for name, value in maybe.items() if rng.random() < 0.35}


def phi3_rope(rng: random.Random) -> dict[str, Any]:
    """Return an object that Phi-3 allows: partial rotation, LongRoPE by any of its names, factors per pair."""
    share = rng.choice([1.0, 0.5, 0.75])
    found: dict[str, Any] = {"rope_theta": rng.choice([100.0, 10000.0]), "partial_rotary_factor": share}
    if rng.random() < 0.7:
        found |= rope(rng, "longrope") | {"type": rng.choice(["longrope", "su", "yarn"])}
        found.pop("rope_type", None)
    return found


def fit(found: dict[str, Any], size: int) -> None:
    """Give LongRoPE in `found` one factor for each pair of a head of `size` values."""
    for value in found.values():
        if isinstance(value, dict):
            fit(value, size)
    pairs = int(size * (found.get("partial_rotary_factor") or 1)) // 2
    for side in ("short_factor", "long_factor"):
        if side in found:
            found[side] = found[side][:pairs]
