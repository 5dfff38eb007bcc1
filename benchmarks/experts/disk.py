"""Experts from disk, a quarter of them in memory: time per token against reading every routed expert, interleaved."""

import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.result import Check, Result, Row, Table
from scheduler.demand.cache import DemandCache
from scheduler.demand.choice.replay import bound
from scheduler.demand.choice.select import recording_of_experts, select
from scheduler.demand.policies import Key
from scheduler.demand.sources import DiskUnits
from scheduler.slots.workers import Readers
from scheduler.storage.disk import DirectDisk
from scheduler.storage.extent import Extent
from tpi.devices.pages import Bytes, page_buffer

LAYERS, EXPERTS, USED = 4, 64, 8  # of OLMoE's shape, with fewer layers
UNIT = 3 * 2048 * 1024 * 5 // 8  # bytes of one of its experts in q4
RECORDED = 256  # tokens, from which the policy is chosen
AIM = 0.9
AGAIN = (0.0, 0.5, 0.8)  # probability with which each expert of the previous token is chosen again
NOTES = f"""
{LAYERS} layers of OLMoE's shape ({EXPERTS} experts of {UNIT / 1e6:.1f} MB in q4, {USED} of them for each token) in a
file that is read past the page cache. Tokens choose experts from a skewed distribution; with the probability `repeats`
each expert of the previous token is chosen again. `trained` is the routing of the small mixture in the tests' data, on
text that is not in its training data: 16 experts in a layer, 2 of them for each token, here as large as the others. The
cases with and without room for a quarter of the experts take turns, token by token. The policy is the one that a node
would choose from {RECORDED} recorded tokens. `share` is the measured gain as a share of 1/(1 - hit rate). That is the
largest gain of a cache if several concurrent reads take no longer than the same reads in sequence. Nothing is
computed, so the figures show the cache and the disk alone. Times are means over all tokens.
"""


def bench(quick: bool) -> Result:
    """Measure with a quarter of the experts in memory, for routings that repeat more and more often."""
    tokens = 12 if quick else 60
    draws = [Draw(f"{again:g}", _routing(RECORDED + tokens, again), EXPERTS) for again in AGAIN]
    if find_spec("torch"):
        draws.append(_trained(RECORDED + tokens))
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        path = Path(folder) / "experts.bin"
        _write(path)
        rows = [_row(path, draw) for draw in draws]
    checks = [Check(f"repeats {row['repeats']}: share of 1/(1 - hit rate)", float(row["share"]), AIM) for row in rows]
    return Result("Experts from disk", NOTES, [Table("A quarter of the experts in memory", rows)], checks)


@dataclass(frozen=True)
class Draw:
    """The experts that tokens choose, `[tokens, layers, used]`, and the number of experts in a layer."""

    repeats: str
    routing: npt.NDArray[np.uint16]
    experts: int


def _trained(tokens: int) -> Draw:
    from benchmarks.experts.routing import trained_routing
    from benchmarks.training.measure import LENGTH

    found, experts = trained_routing(-(-tokens // (LENGTH - 1)))
    return Draw("trained", found.chosen[:tokens], experts)


def _write(path: Path) -> None:
    block = np.random.default_rng(0).integers(0, 256, UNIT, np.uint8).tobytes()
    with path.open("wb") as file:
        for _ in range(LAYERS * EXPERTS):
            file.write(block)


def _row(path: Path, draw: Draw) -> Row:
    routing = draw.routing
    keys = [(layer, expert) for layer in range(LAYERS) for expert in range(draw.experts)]
    slots = len(keys) // 4
    chosen = select(recording_of_experts(routing[:RECORDED], range(LAYERS), keys), slots)
    blocks = np.array([block for block, _ in keys], np.int64)
    extents = {key: Extent(path, number * UNIT, UNIT) for number, key in enumerate(keys)}

    def cache(count: int) -> DemandCache:
        disk = DirectDisk()
        source = DiskUnits(disk, extents)
        memory = page_buffer(count * source.slot_bytes)
        return DemandCache(source, memory, chosen.choice.open(blocks), Readers(disk.threads))

    with closing(cache(slots)) as some, closing(cache(routing.shape[2])) as none:
        warm = min(RECORDED, 24)
        for token in routing[RECORDED - warm : RECORDED]:
            _pass(some, token)
        before = some.stats()
        taken = [(_pass(some, token), _pass(none, token)) for token in routing[RECORDED:]]
        stats, everything = some.stats(), none.stats()
    hits, uses = stats.hits - before.hits, stats.uses - before.uses
    best = bound(recording_of_experts(routing[RECORDED - warm :], range(LAYERS), keys), slots).hit_rate
    with_cache, without = (float(np.mean([pair[at] for pair in taken])) for at in range(2))
    rate, gain = hits / uses, without / with_cache
    assert everything.hits == 0  # as without a cache
    return {
        "repeats": draw.repeats, "policy": chosen.choice.name, "hit rate": round(rate, 3), "at best": round(best, 3),
        "ms, a quarter": round(1e3 * with_cache, 2), "ms, all read": round(1e3 * without, 2),
        "gain": round(gain, 2), "1/(1 - hit rate)": round(1 / max(1e-9, 1 - rate), 2),
        "share": round(gain * (1 - rate), 3),
    }  # fmt: skip


def _pass(cache: DemandCache, token: npt.NDArray[np.uint16]) -> float:
    """Return the seconds to load a token's experts, layer by layer."""
    begun = time.perf_counter()
    cache.begin()
    for layer, experts in enumerate(token.tolist()):
        with cache.groups(_keys(layer, experts)) as groups:
            for group in groups:
                _touch(group)
    return time.perf_counter() - begun


def _keys(layer: int, experts: Sequence[int]) -> list[Key]:
    return [(layer, expert) for expert in experts]


def _touch(group: Sequence[Bytes]) -> int:
    return sum(int(data[0]) for data in group)


def _routing(tokens: int, again: float) -> npt.NDArray[np.uint16]:
    """Draw a routing `[tokens, layers, used]` in which each layer has favourites of its own.

    Each expert of a token is chosen again for the next token with probability `again`.
    """
    random = np.random.default_rng(1)
    weights = 1 / np.arange(1, EXPERTS + 1) ** 0.7
    weights /= weights.sum()
    orders = [random.permutation(EXPERTS) for _ in range(LAYERS)]
    made = np.zeros((tokens, LAYERS, USED), np.uint16)
    for token in range(tokens):
        for layer, order in enumerate(orders):
            kept = made[token - 1, layer][random.random(USED) < again] if token else made[0, 0][:0]
            drawn = random.choice(order, EXPERTS, replace=False, p=weights)
            others = [expert for expert in drawn if expert not in kept]
            made[token, layer] = np.concatenate([kept, others[: USED - len(kept)]])
    return made
