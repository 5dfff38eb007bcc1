"""Families that norm only the outputs of their blocks: published files, and plans that do not fit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from master.deployment.assignments import assignments
from master.deployment.stages import one_stage
from tests.support.altered import OPTIONS, PEERS
from tests.support.models import SIZES
from tpi.config import ModelConfig
from tpi.errors import PlanError
from tpi.families.huggingface.reader import from_huggingface
from tpi.pack.reader import Pack
from worker.plan.checks import check_assign

OLMO3: dict[str, Any] = {
    "architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 8, "sliding_window": 4096, "rope_theta": 500000,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
}  # fmt: skip
EXAONE4: dict[str, Any] = {"architectures": ["Exaone4ForCausalLM"], "num_hidden_layers": 4, "head_dim": 16}


def config_of(fields: dict[str, Any]) -> ModelConfig:
    return from_huggingface(SIZES | fields, lambda name: "lm_head" not in name, "somewhere").config


def test_sliding_layers_of_olmo_3_are_not_scaled() -> None:
    found = config_of(OLMO3)
    assert (found.input_norm, found.whole_norms) == (False, True)
    assert found.windows == (4096, 4096, 4096, 0) * 2
    assert found.rope_kinds == (2, 2, 2, 1) * 2
    assert found.rope(0)[1] == 1.0
    assert found.rope(3)[1] == pytest.approx(1.2079441541679836)
    assert found.local_inv_freq[-1] > found.inv_freq[-1]


@pytest.mark.parametrize(
    ("fields", "windows", "kinds"),
    [
        ({"layer_types": ["full_attention"] * 4, "sliding_window": None, "sliding_window_pattern": None}, (), ()),
        ({"sliding_window": 4096}, (4096, 4096, 4096, 0), (1, 1, 1, 0)),
        (
            {"sliding_window": 512, "sliding_window_pattern": "LLLG",
             "layer_types": ["sliding_attention", "full_attention"] * 2},
            (512, 0, 512, 0), (1, 0, 1, 0),
        ),
    ],
)  # fmt: skip
def test_exaone_rotates_sliding_layers_alone_if_it_has_any(
    fields: dict[str, Any], windows: tuple[int, ...], kinds: tuple[int, ...]
) -> None:
    found = config_of(EXAONE4 | fields)
    assert (found.windows, found.rope_kinds, found.input_norm) == (windows, kinds, False)


def test_plans_with_norms_that_no_block_uses_are_refused(tiny_pack: Callable[..., Pack]) -> None:
    pack = tiny_pack("exaone4")
    good = assignments(pack, one_stage(pack, [1, 1, 1]), PEERS, OPTIONS, 1, 1)[1]
    check_assign(good)
    block = good.blocks[0]
    further = replace(block.vectors[0], name="norm", length=pack.config.hidden)
    changed = replace(good, blocks=(replace(block, vectors=(*block.vectors, further)), *good.blocks[1:]))
    with pytest.raises(PlanError, match="the vectors of a block are"):
        check_assign(changed)
    with pytest.raises(PlanError, match="the vectors of a block are"):
        check_assign(replace(good, config=replace(pack.config, input_norm=True)))
