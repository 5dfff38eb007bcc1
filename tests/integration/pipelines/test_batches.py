"""A batch in micro-batches: every token is that of the request alone, on whichever side attention is computed."""

from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.inprocess import in_process_deployment
from tests.support.devices.offloading import answers, batched, offloaded, prompts, weights_bytes
from tests.support.models import write_tokenizer
from tpi.devices.choose import open_device
from tpi.devices.options import KvPlace, OffloadOptions, Weights
from tpi.errors import PlanError
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

STREAMED = OffloadOptions("ram", "ram", "batch")
FALCON = {
    "vocab_size": 320, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "multi_query": True,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SMALL: dict[str, Any] = {"context": 64, "pool": 96, "chunk": 32}  # tokens, pages


def alone(pack: Pack, cache: Path, asked: list[list[int]]) -> list[list[int]]:
    """Return the answers of each request by itself on the host."""
    with closing(in_process_deployment(pack, [1], cache / "host", **SMALL)) as deployment:
        return [answer for prompt in asked for answer in answers(deployment, [prompt])]


@pytest.mark.parametrize("kv", ["auto", "gpu"])
@pytest.mark.parametrize("share", [0.5, 0.9, 3.0])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_tokens_of_a_batch_are_those_of_each_request_alone(
    family: str, share: float, kv: KvPlace, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    pack = tiny_pack(family)
    asked = prompts(pack.config.vocab, 11, seed=4)
    expected = alone(pack, tmp_path, asked)
    room = int(share * weights_bytes(pack)) + (4 << 20)
    with (
        closing(open_device("emu:1GiB,stretch=1", room)) as device,
        offloaded(
            pack, tmp_path / "batch", {0: device}, OffloadOptions(kv=kv, pipeline="batch"), **SMALL
        ) as deployment,
    ):
        link = batched(deployment)
        assert answers(deployment, asked) == expected
        assert device.memory.used <= link.offload.memory_bytes <= room


@pytest.mark.parametrize(
    ("family", "dtype", "weights"),
    [
        ("olmoe", "f32", "ram"), ("qwen2moe", "f32", "auto"), ("dbrx", "f32", "disk"), ("gemma2", "f32", "ram"),
        ("opt", "f32", "disk"), ("mixtral", "q4", "auto"), ("llama", "q8", "disk"), ("olmo2", "f32", "ram"),
    ],
)  # fmt: skip
def test_other_families_and_formats(
    family: str, dtype: str, weights: Weights, tiny_pack: Callable[..., Pack], tmp_path: Path
) -> None:
    """Norms over all heads, biases, norms after a block, shared experts; quantised weights; from disk through RAM."""
    pack = tiny_pack(family, dtype)
    asked = prompts(pack.config.vocab, 9, seed=3)
    with closing(in_process_deployment(pack, [1], tmp_path / "host", **SMALL)) as deployment:
        expected = answers(deployment, asked)
    options = OffloadOptions(weights, "ram", "batch")
    with (
        closing(open_device("emu:1GiB,stretch=1", weights_bytes(pack) + (6 << 20))) as card,
        offloaded(pack, tmp_path / "batch", {0: card}, options, **SMALL) as deployment,
    ):
        link = batched(deployment)
        assert answers(deployment, asked) == expected
        assert (link.figures.weight_bytes > 0) == (weights != "auto")


def test_several_nodes_that_were_told_nothing_are_refused(tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    with (
        closing(open_device("emu:1GiB,stretch=1")) as card,
        pytest.raises(PlanError, match="from the master, which sent none"),
        offloaded(tiny_pack("llama"), tmp_path, {0: card}, STREAMED, (1, 1), **SMALL),
    ):
        pass


@pytest.mark.parametrize("adds_there", [True, False])
@pytest.mark.parametrize("more", [{}, {"new_decoder_architecture": True, "num_kv_heads": 2}], ids=["one norm", "two"])
def test_layers_whose_halves_share_an_input(more: dict[str, Any], adds_there: bool, tmp_path: Path) -> None:
    """In Falcon, the result of attention is added to the sum of the neurons; larger models have two norms."""
    import torch
    import transformers

    torch.manual_seed(4)
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**FALCON, **more))
    for name, weights in model.named_parameters():
        if ".ln_" in name:
            torch.nn.init.normal_(weights, 1.0, 0.5)  # norms that differ
    model.save_pretrained(tmp_path / "falcon")
    write_tokenizer(tmp_path / "falcon")
    pack_model(open_source(tmp_path / "falcon"), "f32", tmp_path / "pack")
    pack = Pack.open(tmp_path / "pack")
    assert pack.config.parallel
    asked = prompts(pack.config.vocab, 5, seed=3)
    with closing(in_process_deployment(pack, [1], tmp_path / "host", **SMALL)) as deployment:
        expected = answers(deployment, asked)
    with (
        closing(open_device("emu:1GiB,stretch=1", 8 << 20)) as card,
        offloaded(pack, tmp_path / "batch", {0: card}, STREAMED, **SMALL) as deployment,
    ):
        batched(deployment).lanes.adds_there = adds_there
        assert answers(deployment, asked) == expected


@pytest.mark.parametrize("kv", ["auto", "ram", "gpu"])
def test_no_plan_takes_more_than_there_is(kv: KvPlace, tiny_pack: Callable[..., Pack], tmp_path: Path) -> None:
    """Memory grows from almost nothing to room for all.

    Plans that fit keep to it, others are refused before they run.
    """
    pack = tiny_pack("mixtral")
    fitting = 0
    for room in range(1 << 19, 6 << 20, 356_789):
        with (
            closing(open_device("emu:1GiB,stretch=1", room)) as device,
            suppress(PlanError),
            offloaded(pack, tmp_path, {0: device}, OffloadOptions(kv=kv, pipeline="batch"), **SMALL) as deployment,
        ):
            link = batched(deployment)
            assert device.memory.used <= link.offload.memory_bytes <= room
            fitting += 1
    assert 4 < fitting < 16
