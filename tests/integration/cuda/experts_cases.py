"""Experts and batches on the card: a block against the reference, and nodes whose tokens are the host's."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.chunked import in_chunks
from tests.support.devices.cuda_device import open_tested
from tests.support.devices.demanding import DEMAND, arena_of, at_once, slots_for_share
from tests.support.devices.held import held
from tests.support.devices.offloading import answers, batched, offloaded, weights_bytes
from tests.support.kernels.expert_cases import ExpertsCase, experts_case
from tests.support.kernels.kernel_cases import reference
from tests.support.models import VOCAB, write_tokenizer
from tpi.config import Format
from tpi.devices.cuda.device import CudaDevice
from tpi.devices.options import OffloadOptions
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack
from worker.equipment import AcceleratorSetup
from worker.pipelines.chunktable import TableExperts

SMALL: dict[str, Any] = {"context": 32, "pool": 8, "chunk": 16}  # tokens, pages
ASKED = [[5, 6], [300], [17], [88]]
LENGTH = 2  # tokens of an answer
TOLERANCE: dict[Format, float] = {"f32": 5e-6, "q4": 8e-3}


def case_of(format: Format, tokens: int) -> ExpertsCase:
    random = np.random.default_rng([21, tokens])
    return experts_case(
        random, format=format, hidden=32, experts=4, used=2, units=1, shared=1, gate=True, tokens=tokens
    )


@pytest.mark.parametrize(("format", "tokens"), [("f32", 1), ("f32", 5), ("q4", 3)])
def test_tokens_are_grouped_by_expert_beside_the_shared_one(device: CudaDevice, format: Format, tokens: int) -> None:
    """One call computes all experts that the tokens chose, and the shared one."""
    case = case_of(format, tokens)
    chosen = reference.route(case.spec.router, case.x)
    expected = reference.experts(case.spec, case.data, case.x, chosen)
    with held(device, case.data) as (data,):
        x = device.kernels.prepare(case.spec, reference.prepare(case.spec, case.x))
        routing = device.kernels.route(case.spec.router, x)
        found = device.kernels.experts(case.spec, data, x, routing)
    np.testing.assert_array_equal(routing.experts, chosen.experts)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[format] * np.abs(expected).max())


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    """A tiny pack, because everything is interpreted: three layers of four experts and a shared one with a gate."""
    import torch
    import transformers

    config = transformers.Qwen2MoeConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, vocab_size=VOCAB,
        max_position_embeddings=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(26)
    source, packed = tmp_path_factory.mktemp("tiny"), tmp_path_factory.mktemp("packed") / "tiny"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(source)
    write_tokenizer(source)
    pack_model(open_source(source), "f32", packed)
    return Pack.open(packed)


def answered_on_the_host(pack: Pack, cache: Path) -> list[list[int]]:
    with closing(in_process_deployment(pack, [1], cache, **SMALL)) as deployment:
        return answers(deployment, ASKED, LENGTH)


def test_experts_that_come_when_they_are_wanted(pack: Pack, tmp_path: Path) -> None:
    """Some experts are on the card, some are fetched for the token, and the host computes the others."""
    expected = answered_on_the_host(pack, tmp_path / "host")
    with closing(open_tested(16 << 20)) as card:
        how = AcceleratorSetup(card, at_once(20.0), DEMAND, slots_for_share(1 / 3))
        made = in_process_deployment(pack, [1], tmp_path / "card", accelerators={0: how}, **SMALL)
        with closing(made) as deployment:
            assert answers(deployment, ASKED, LENGTH) == expected
            stats = arena_of(deployment.node).cache.stats()
            assert stats.hits > 0
            assert stats.misses + stats.elsewhere > 0
        assert card.memory.used == 0


@pytest.mark.parametrize(("kept", "chunks"), [(0.0, 2), (0.7, 3)])
def test_a_batch_in_micro_batches_has_the_tokens_of_the_host(
    kept: float, chunks: int, pack: Pack, tmp_path: Path
) -> None:
    """In the order of CGOPipe, the host attends two micro-batches ahead, and weights are copied in chunks in between.

    Some of the experts are resident, and one call computes all of them through a table.
    """
    expected = answered_on_the_host(pack, tmp_path / "host")
    options = OffloadOptions("auto", "ram", "batch")
    with (
        closing(open_tested(weights_bytes(pack) + (8 << 20))) as card,
        offloaded(
            pack, tmp_path / "card", {0: card}, options, decide={0: in_chunks(kept, chunks)}, **SMALL
        ) as deployment,
    ):
        link = batched(deployment, micro_batch=2)
        assert answers(deployment, ASKED, LENGTH) == expected
        assert not link.settings.policy.attention_there
        assert link.figures.weight_bytes > (1 - kept) * weights_bytes(pack)
        segments = [each for block in deployment.node.loop.weights.now.blocks for each in block]
        assert sum(isinstance(segment, TableExperts) for segment in segments) == pack.config.layers
