"""The layer for multi-token prediction of EXAONE, ERNIE and Nemotron: what it computes, and that answers stay."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from master.generation.engine import Engine
from master.generation.speculation import speculation
from tests.support.cluster.inprocess import in_process_deployment
from tests.support.speculating import PROMPTS, answers, draft_always, samplers
from tests.support.weights.mtp_apart import LAYOUTS, make_apart, reference
from tpi.net.messages import StepEntry
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack


@pytest.mark.parametrize("family", LAYOUTS)
def test_the_layer_computes_what_its_specification_says(family: str, tmp_path: Path) -> None:
    model, tokens = make_apart(family, tmp_path / "model"), (PROMPTS[2] * 2)[:40]
    pack_model(open_source(model.directory), "f32", tmp_path / "pack")
    hidden, normed, logits = reference(model, family, tokens)
    with closing(in_process_deployment(Pack.open(tmp_path / "pack"), [1], tmp_path)) as deployment:
        layer, count = deployment.mtp, len(tokens) - 1
        assert layer is not None
        half = count // 2  # the pages hold what the first call computed
        parts = [
            layer.run([StepEntry(3, 0, half, 0, (0,))], (), tokens[1 : half + 1], hidden[:half]),
            layer.run([StepEntry(3, half, count - half, 1, (1,))], (), tokens[half + 1 :], hidden[half:]),
        ]
        out = np.concatenate(parts)
        np.testing.assert_allclose(layer.head.norm(out), normed, atol=2e-4)
        np.testing.assert_allclose(layer.head(out), logits, atol=4e-4)


@pytest.mark.parametrize("family", LAYOUTS)
@pytest.mark.parametrize("right", [True, False])
def test_drafts_change_no_answer(family: str, right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    monkeypatch.setattr(speculation, "look_up", lambda tokens, earlier, most: ([], 0))
    pack_model(open_source(make_apart(family, tmp_path / "model", right).directory), "q4", tmp_path / "pack")
    with closing(in_process_deployment(Pack.open(tmp_path / "pack"), [2, 1], tmp_path)) as deployment:
        engine = Engine(deployment)
        engine.drafts = False
        expected = answers(engine, samplers(2))
        engine = Engine(deployment)
        assert answers(engine, samplers(2)) == expected
        assert engine.speculation.drafted["mtp"] > 0
        assert (engine.speculation.accepted["mtp"] > 10) == right
