"""What a plan may say of experts: see `worker.plan.checks`."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from tpi.config import BlockKind, ModelConfig
from tpi.errors import ModelError
from tpi.families.checks import check_mixture
from tpi.net.messages import BlockPlan
from tpi.pack.layout import RunName, RunShape, ffn_units
from tpi.partition import FFN_UNIT


def expert_runs(config: ModelConfig) -> dict[BlockKind, Mapping[RunName, RunShape]]:
    """The runs of a block of experts. Empty if there are none."""
    mixture = config.mixture
    if mixture is None:
        return {}
    shared: dict[RunName, RunShape] = {"shared": RunShape(mixture.shared, FFN_UNIT, config.hidden)}
    routed = RunShape(mixture.experts * ffn_units(mixture.width) * FFN_UNIT, FFN_UNIT, config.hidden)
    return {"experts": (shared if mixture.shared else {}) | {"neuron": routed}}


def expert_vectors(config: ModelConfig) -> dict[str, int]:
    """The lengths of the vectors that such a block has beside a norm."""
    assert config.mixture is not None  # there are no runs without it
    experts, width = config.mixture.experts, config.mixture.width
    return {
        "router": experts * config.hidden,
        "router.bias": experts,
        "router.choice": experts,
        "shared.scale": config.hidden,
        "gate.biases": experts * width,
        "up.biases": experts * width,
        "down.biases": experts * config.hidden,
    }


def mixture_fault(config: ModelConfig) -> str | None:
    """What is wrong with the settings of experts, if anything is."""
    if config.mixture is None:
        return None
    try:
        check_mixture(config.mixture, "it")
    except ModelError as error:
        return str(error)
    return None


def slices_fault(names: Sequence[str], block: BlockPlan) -> str | None:
    """Ranges of one run, whose names are `names`, have one layout and follow one another without touching."""
    for (one, name), (other, following) in pairwise(zip(block.runs, names, strict=True)):
        if name == following and (one.layout != other.layout or one.last > other.first):
            return f"units {other.first} to {other.last} of its experts follow {one.first} to {one.last}"
    return None
