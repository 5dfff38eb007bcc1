"""A node that cannot be built leaves nothing open: the next plan finds the memory free."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allreduce.algorithms.loopback import Loopback
from allreduce.base import Endpoints, Group, GroupSpec
from master.vocabulary import vocabulary
from master.vocabulary.vocabulary import Vocabulary
from tests.support.cluster.single import Setting, single_node
from tpi.devices.pages import PAGE, round_up
from tpi.kernels.kv import KvPages
from tpi.pack.reader import Pack
from worker.node import group


def readers() -> list[threading.Thread]:
    """Return the threads that load weights."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("tpi-reader")]


@pytest.mark.parametrize("setting", [Setting(), Setting(window=1)])
def test_a_node_without_memory_for_its_kv_closes_what_is_open(
    setting: Setting, tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Recorded(Loopback):
        def close(self) -> None:
            closed.append(self.name)

    def recorded(name: str, spec: GroupSpec, endpoints: Endpoints) -> Group:
        return Recorded(spec, endpoints)

    def out_of_memory(*arguments: Any) -> KvPages:
        raise MemoryError

    monkeypatch.setattr(group, "open_group", recorded)
    with monkeypatch.context() as without:
        without.setattr(KvPages, "of_layers", out_of_memory)
        with pytest.raises(MemoryError), single_node(tiny_pack("llama"), setting, cache=tmp_path):
            pass
    assert not readers()
    assert closed == ["loopback"]
    with single_node(tiny_pack("llama"), setting, cache=tmp_path):
        assert closed == ["loopback"]
    assert not readers()


def test_ends_that_cannot_be_opened_close_the_head_that_streams(
    tiny_pack: Callable[..., Pack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*arguments: Any) -> None:
        raise MemoryError

    pack = tiny_pack("llama")
    with single_node(pack, Setting(), cache=tmp_path) as (_, node):
        budget = replace(node.budget, head_bytes=2 * (round_up(pack.head.run("row").unit_bytes) + PAGE))
    with Vocabulary(pack, budget):
        assert readers()
    monkeypatch.setattr(vocabulary, "Embedding", out_of_memory)
    with pytest.raises(MemoryError):
        Vocabulary(pack, budget)
    assert not readers()
