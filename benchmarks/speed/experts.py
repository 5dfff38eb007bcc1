"""Speed of a block of experts against a dense block that reads as many bytes, interleaved in the same run.

    python -m benchmarks.speed.experts [--threads N] [--rounds N] [--json]

One token passes a chain of blocks, as in decoding: norm, router, the chosen experts. The dense chain has as many
neurons as a token's experts together. Blocks rotate, so that no cache serves their weights.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from benchmarks.speed.kernels import Figure, Pool, figure, native
from tpi.config import Mixture
from tpi.kernels.spec import (
    F32,
    NO_TOKENS,
    ChainBlock,
    ExpertPiece,
    ExpertsSpec,
    FfnSpec,
    NormSpec,
    Residual,
    RouterSpec,
)
from tpi.pack.layout import Part, RunLayout
from tpi.partition import FFN_UNIT
from tpi.system.machine import usable_cores

_BLOCKS = 4  # of a chain
_PROMPTS = (16, 128, 512)


@dataclass(frozen=True)
class Shape:
    """A published model's blocks of experts."""

    name: str
    hidden: int
    mixture: Mixture


SHAPES = (
    Shape("OLMoE-1B-7B", 2048, Mixture(64, 8, 1024)),
    Shape("Qwen3-30B-A3B", 2048, Mixture(128, 8, 768, normalised=True)),
    Shape("Granite-3.1-1B-A400M", 1024, Mixture(32, 8, 512, normalised=True)),
)


@dataclass(frozen=True)
class Blocks:
    """A chain of expert blocks and a chain of dense blocks that read equally many bytes for a token."""

    experts: list[ChainBlock]
    dense: list[ChainBlock]
    nbytes: int  # bytes of the weights of a token's experts in all blocks


def blocks_of(shape: Shape, pool: Pool) -> Blocks:
    """Make chains of random q4 blocks, of experts and dense."""
    random, mixture = np.random.default_rng(0), shape.mixture
    parts = (Part("gate", "q4", "row"), Part("up", "q4", "row"), Part("down", "q4", "column"))
    each = mixture.width // FFN_UNIT
    run = RunLayout("neuron", "tiled", parts, FFN_UNIT, shape.hidden, mixture.experts * each)
    norm = NormSpec("rms", 1e-5, np.ones(shape.hidden, np.float32))
    pieces = tuple(ExpertPiece(expert, each) for expert in range(mixture.experts))
    experts, dense = [], []
    for _ in range(_BLOCKS):
        weight = random.normal(size=(mixture.experts, shape.hidden)).astype(np.float32)
        routed = FfnSpec(run, "silu", True, norm, None, None)
        spec = ExpertsSpec(routed, pieces, None, RouterSpec(mixture, norm, weight))
        data = pool.take(run.units * run.unit_bytes)
        experts.append(ChainBlock(spec, data, Residual()))
        used = replace(run, units=mixture.used * each)
        first = random.integers(0, mixture.experts - mixture.used + 1) * each * run.unit_bytes
        part = data[first : first + used.units * run.unit_bytes]
        dense.append(ChainBlock(replace(routed, neuron=used), part, Residual()))
    return Blocks(experts, dense, _BLOCKS * mixture.used * each * run.unit_bytes)


def decode(shape: Shape, blocks: Blocks, rounds: int) -> list[Figure]:
    """Return the GB/s of the weights that one token uses, with another token in every round."""
    chains = {"experts": native.open_chain(blocks.experts), "dense": native.open_chain(blocks.dense)}
    random, taken = np.random.default_rng(1), dict[str, list[float]](experts=[], dense=[])
    for _ in range(rounds + 1):
        for name, chain in chains.items():
            x = random.normal(size=(1, shape.hidden)).astype(np.float32)
            taken[name].append(seconds(partial(chain.run, x, _BATCH)))
    return [figure(f"{shape.name} {name}", blocks.nbytes / 1e9, each[1:], "GB/s") for name, each in taken.items()]


def prompts(shape: Shape, blocks: Blocks, rounds: int) -> list[Figure]:
    """Return the prompt tokens per second of one block."""
    random, figures = np.random.default_rng(2), []
    for tokens in _PROMPTS:
        x = random.normal(size=(tokens, shape.hidden)).astype(np.float32)
        taken = [seconds(partial(one, block, x)) for _ in range(rounds) for block in blocks.experts]
        figures.append(figure(f"{shape.name}, {tokens} tokens", tokens, taken, "tok/s"))
    return figures


def one(block: ChainBlock, x: F32) -> F32:
    """Compute one block of experts."""
    assert isinstance(block.spec, ExpertsSpec)
    prepared = native.prepare(block.spec, x)
    return native.experts(block.spec, block.data, prepared, native.route(block.spec.router, prepared))


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


_BATCH = replace(NO_TOKENS, positions=np.zeros(1, np.int32), sequence=np.zeros(1, np.int32))


def main() -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    native.set_threads(options.threads)
    pool, tables = Pool(), dict[str, list[Figure]](decode=[], prompt=[])
    for shape in SHAPES:
        blocks = blocks_of(shape, pool)
        tables["decode"] += decode(shape, blocks, options.rounds)
        tables["prompt"] += prompts(shape, blocks, max(1, options.rounds // 8))
    if options.json:
        print(json.dumps({title: [asdict(row) for row in figures] for title, figures in tables.items()}))
        return
    print(f"{native.isa()}, {options.threads} threads; median of {options.rounds} rounds (best)")
    for title, figures in tables.items():
        print(f"\n{title}")
        for row in figures:
            print(f"  {row.name:36} {row.value:8.3g} {row.unit:6} ({row.best:.3g})")


if __name__ == "__main__":
    main()
