"""Random blocks with states, for the kernels' tests."""

from dataclasses import dataclass

import numpy as np

from tests.support.kernels.kernel_cases import Random, layout_of, norm_spec, normal, pack
from tpi.config import Format
from tpi.kernels.spec import (
    F32,
    I32,
    LATER,
    U8,
    Batch,
    ConvSpec,
    DeltaSpec,
    MambaSpec,
    RecurrentSpec,
    SpreadNorm,
)
from tpi.pack.layout import Part

SLOTS = 6
Shape = tuple[int, int, int, int, int]


def slots_of(*pairs: tuple[int, int], taken: int = 0, later: int = 0) -> I32:
    """Return the states of sequences as a batch has them: the pairs of slots that are read and written."""
    return np.array([(read, write, taken, later) for read, write in pairs], np.int32)


def settled(spec: RecurrentSpec) -> int:
    """Return how many of a state's first values do not depend on later tokens."""
    if isinstance(spec, ConvSpec):
        return spec.state_values - LATER * spec.channels
    return spec.state_values - LATER * (spec.channels + 2 * spec.heads)


@dataclass(frozen=True)
class DeltaCase:
    spec: DeltaSpec
    data: U8
    x: F32
    states: F32
    batch: Batch


def delta_case(
    random: Random,
    *,
    format: Format = "f32",
    hidden: int = 64,
    heads: int = 4,
    key_heads: int = 2,
    key: int = 16,
    value: int = 32,
    taps: int = 4,
    lengths: tuple[int, ...] = (5,),
    slots: tuple[tuple[int, int], ...] = ((-1, 0),),
) -> DeltaCase:
    """A random block: `lengths` are the tokens of each sequence in the step, `slots` their states."""
    parts = [Part("v", format, "row"), Part("gate", format, "row"), Part("o", format, "column")]
    values, value_data = pack(random, "value", layout_of(format), parts, value, hidden, heads)
    keys, key_data = pack(
        random, "key", layout_of(format), [Part(p, format, "row") for p in ("q", "k")], key, hidden, key_heads
    )
    spec = DeltaSpec(
        values=values,
        keys=keys,
        heads=heads,
        key_heads=key_heads,
        key=key,
        value=value,
        taps=taps,
        key_index=np.arange(heads, dtype=np.int32) * key_heads // heads,
        norm=norm_spec(random, "rms", hidden),
        a=normal(random, heads, hidden, scale=hidden**-0.5),
        b=normal(random, heads, hidden, scale=hidden**-0.5),
        decay=-np.exp(normal(random, heads)),
        decay_bias=normal(random, heads),
        conv_q=normal(random, key_heads * key, taps),
        conv_k=normal(random, key_heads * key, taps),
        conv_v=normal(random, heads * value, taps),
        out_norm=normal(random, value),
    )
    batch = _batch(lengths, slots)
    states = normal(random, SLOTS, spec.state_values)
    return DeltaCase(spec, np.concatenate([value_data, key_data]), normal(random, sum(lengths), hidden), states, batch)


def conv_case(
    random: Random,
    format: Format = "f32",
    hidden: int = 64,
    channels: int = 64,
    taps: int = 3,
    lengths: tuple[int, ...] = (5,),
    slots: tuple[tuple[int, int], ...] = ((-1, 0),),
) -> tuple[ConvSpec, U8, F32, F32, Batch]:
    """A random block; `lengths` are the tokens of each sequence in the step, `slots` their states."""
    parts = [Part(part, format, "row") for part in ("v", "input", "gate")] + [Part("o", format, "column")]
    values, data = pack(random, "value", layout_of(format), parts, 32, hidden, -(-channels // 32))
    spec = ConvSpec(values, channels, norm_spec(random, "rms", hidden), normal(random, channels, taps))
    batch = _batch(lengths, slots)
    return spec, data, normal(random, sum(lengths), hidden), normal(random, SLOTS, spec.state_values), batch


@dataclass(frozen=True)
class MambaCase:
    spec: MambaSpec
    data: U8
    x: F32
    states: F32
    batch: Batch


def mamba_case(
    seed: int,
    shape: Shape = (4, 2, 16, 32, 4),
    lengths: tuple[int, ...] = (5,),
    slots: tuple[tuple[int, int], ...] = ((-1, 0),),
    format: Format = "f32",
    hidden: int = 64,
) -> MambaCase:
    """A random block; `lengths` are the tokens of each sequence in the step, `slots` their states."""
    (heads, key_heads, key, value, taps), random = shape, np.random.default_rng(seed)
    parts = [Part("v", format, "row"), Part("gate", format, "row"), Part("o", format, "column")]
    values, value_data = pack(random, "value", layout_of(format), parts, value, hidden, heads)
    parts = [Part(name, format, "row") for name in ("q", "k")]
    keys, key_data = pack(random, "key", layout_of(format), parts, key, hidden, key_heads)
    spec = MambaSpec(
        values=values,
        keys=keys,
        heads=heads,
        key_heads=key_heads,
        key=key,
        value=value,
        taps=taps,
        key_index=np.arange(heads, dtype=np.int32) * key_heads // heads,
        norm=norm_spec(random, "rms", hidden),
        a=normal(random, heads, hidden, scale=hidden**-0.5),
        decay=-np.exp(normal(random, heads)),
        decay_bias=normal(random, heads),
        skip=normal(random, heads),
        least_step=0.3,
        most_step=1.5,
        conv_q=normal(random, key_heads * key, taps),
        conv_k=normal(random, key_heads * key, taps),
        conv_v=normal(random, heads * value, taps),
        conv_bias=normal(random, 2 * key_heads * key + heads * value),
        out_norm=normal(random, heads * value),
        out_eps=0.01,
        spread=SpreadNorm(heads * value, 0.01) if key_heads == 1 else None,
    )
    batch = _batch(lengths, slots)
    states = normal(random, SLOTS, spec.state_values)
    return MambaCase(spec, np.concatenate([value_data, key_data]), normal(random, sum(lengths), hidden), states, batch)


def _batch(lengths: tuple[int, ...], slots: tuple[tuple[int, int], ...]) -> Batch:
    rows = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    return Batch(np.zeros(len(rows), np.int32), rows, np.zeros((len(lengths), 1), np.int32), slots_of(*slots))
