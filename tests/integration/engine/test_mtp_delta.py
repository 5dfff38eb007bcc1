"""The layer for multi-token prediction of models with DeltaNet layers: what it computes, and that answers stay."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from master.generation.engine import Engine
from master.generation.speculation import speculation
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.models import TinyModel
from tests.support.speculating import PROMPTS, answers, draft_always, samplers
from tests.support.weights.mtp_delta import FAMILIES, make_delta_mtp, reference
from tpi.net.messages import StepEntry
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

Packed = Callable[[str, bool, str], tuple[TinyModel, Pack]]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """Models and their packs by family, by whether the layer is always right, and by dtype."""
    models, packs = dict[tuple[str, bool], TinyModel](), dict[tuple[str, bool, str], Path]()

    def get(family: str, right: bool, dtype: str) -> tuple[TinyModel, Pack]:
        if (family, right) not in models:
            models[family, right] = make_delta_mtp(family, tmp_path_factory.mktemp(family), right)
        model = models[family, right]
        if (family, right, dtype) not in packs:
            target = packs[family, right, dtype] = tmp_path_factory.mktemp("packs") / family
            pack_model(open_source(model.directory), dtype, target)
        return model, Pack.open(packs[family, right, dtype])

    return get


@pytest.fixture(autouse=True)
def _always_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    monkeypatch.setattr(speculation, "look_up", lambda tokens, earlier, most: ([], 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_computes_what_its_specification_says(family: str, packed: Packed, tmp_path: Path) -> None:
    model, pack = packed(family, False, "f32")
    tokens = (PROMPTS[2] * 2)[:40]
    hidden, normed, logits = reference(model, tokens)
    with closing(in_process_deployment(pack, [1], tmp_path)) as deployment:
        layer, count = deployment.mtp, len(tokens) - 1
        assert layer is not None
        parts = list[np.ndarray]()
        for first in range(0, count, 13):  # the pages hold what earlier calls computed
            last = min(first + 13, count)
            entry = StepEntry(
                3, first, last - first, min(1, first), (0,) if not first else (1,) if last == count else ()
            )
            parts.append(layer.run([entry], (), tokens[first + 1 : last + 1], hidden[first:last]))
        out = np.concatenate(parts)
        np.testing.assert_allclose(layer.head.norm(out), normed, atol=1e-4)
        np.testing.assert_allclose(layer.head(out), logits, atol=2e-4)


@pytest.mark.parametrize(("family", "right"), [("qwen35", True), ("qwen35", False), ("qwen3next", True)])
@pytest.mark.parametrize(("shares", "stages", "streams"), [([1], "1", 1), ([2, 1, 3], "1", 3), ([1, 1], "2", 1)])
def test_drafts_change_no_answer(
    family: str, right: bool, shares: list[float], stages: str, streams: int, packed: Packed, tmp_path: Path
) -> None:
    _, pack = packed(family, right, "q4")
    with closing(in_process_deployment(pack, shares, tmp_path, stages=stages)) as deployment:
        engine = Engine(deployment)
        engine.drafts = False
        expected = answers(engine, samplers(streams))
        engine = Engine(deployment)
        assert answers(engine, samplers(streams)) == expected
        assert engine.speculation.drafted["mtp"] > 0
        assert (engine.speculation.accepted["mtp"] > 10) == right


def test_drafts_go_on_after_the_deployment_is_replaced(packed: Packed, tmp_path: Path) -> None:
    _, pack = packed("qwen35", True, "q4")
    with (
        closing(in_process_deployment(pack, [1, 1], tmp_path)) as one,
        closing(in_process_deployment(pack, [1], tmp_path / "other", epoch=2)) as other,
    ):
        engine = Engine(other)
        engine.drafts = False
        expected = answers(engine, samplers(1))
        engine = Engine(one)
        accepted, step = list[int](), engine.step

        def counted() -> None:
            step()
            accepted.append(engine.speculation.accepted["mtp"])
            if len(accepted) == 3:
                engine.replace(other)

        engine.step = counted  # type: ignore[method-assign]
        assert answers(engine, samplers(1)) == expected
        assert 0 < accepted[2] < accepted[-1]
