"""A node whose accelerator holds some of its weights, or none: the same tokens, within its memory, all given back."""

from collections.abc import Callable
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest

from tests.support.inprocess import in_process_deployment
from tests.support.offloading import answers, offloaded, prompts, weights_bytes
from tests.support.twin import Twin
from tpi.devices.host import open_host
from tpi.offloading import OffloadOptions
from tpi.pack.reader import Pack

PLACEMENTS = list(product(["auto", "gpu", "ram", "disk"], ["auto", "gpu", "ram"], ["auto", "performance", "memory"]))
BATCHES = [1, 4, 32]


@pytest.mark.parametrize(("weights", "kv", "pipeline"), PLACEMENTS)
def test_every_placement_and_pipeline_answers_as_the_host_does(
    weights: str, kv: str, pipeline: str, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """Weights that stay, stream from memory or from disk; in batches; always on the accelerator, or only if it pays."""
    pack = tiny_pack("llama")
    share = 1.5 if weights == "gpu" else 0.6
    for batch, crossover in product(BATCHES, [1, 8]):
        asked = prompts(pack.config.vocab, batch, seed=batch)
        with closing(in_process_deployment(pack, [1], tmp_path / "host", context=64, pool=96)) as deployment:
            expected = answers(deployment, asked)
        options = OffloadOptions(weights, kv, pipeline, crossover)  # type: ignore[arg-type]
        kv_room = 3 << 20
        with (
            Twin(open_host().kernels, int(share * weights_bytes(pack)) + kv_room) as twin,
            offloaded(pack, tmp_path / "twin", {0: twin}, options, context=64, pool=96) as deployment,
        ):
            assert answers(deployment, asked) == expected
