"""The policy that a node takes: by its own routing, never over the cliff; and hints that do not come true."""

from pathlib import Path

import numpy as np
import pytest

from scheduler.demand.choice.replay import Recording
from scheduler.demand.choice.select import of_experts, select
from scheduler.demand.loads import HintRecord
from tpi.errors import ModelError
from tpi.pack.routing import MOST_TOKENS, RoutingRecord, heard, load_routing, save_routing

LAYERS, EXPERTS, USED = 4, 16, 2
KEYS = [(2 * layer + 1, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
BLOCKS = [1, 3, 5, 7]


def routing(tokens: int, weights: np.ndarray, sticky: float = 0.0, seed: int = 0) -> np.ndarray:
    """Experts drawn by `weights`, or with probability `sticky` those of the token before."""
    random = np.random.default_rng(seed)
    made = np.zeros((tokens, LAYERS, USED), np.uint16)
    for token in range(tokens):
        for layer in range(LAYERS):
            again = token and random.random() < sticky
            drawn = random.choice(EXPERTS, USED, replace=False, p=weights)
            made[token, layer] = made[token - 1, layer] if again else drawn
    return made


EVEN = np.full(EXPERTS, 1 / EXPERTS)
SKEWED = 0.6 ** np.arange(EXPERTS) / (0.6 ** np.arange(EXPERTS)).sum()


def test_uses_are_those_of_units_that_this_node_has() -> None:
    experts = np.array([[[3, 1], [0, 2]]], np.uint16)
    recording = of_experts(experts, [1, 3], [(1, 1), (1, 3), (3, 5)])
    assert [[use.tolist() for use in step] for step in recording.steps] == [[[1, 0]]]
    assert recording.blocks.tolist() == [1, 1, 3]


def test_below_one_tokens_units_lru_is_never_taken_and_what_counts_uses_is() -> None:
    recording = of_experts(routing(120, SKEWED), BLOCKS, KEYS)
    for slots in (4, 5, 7):
        chosen = select(recording, slots)
        assert chosen.choice.kind != "lru"
        assert chosen.hit_rate is not None
        assert chosen.lru < chosen.hit_rate <= chosen.best


def test_where_the_last_token_tells_most_a_policy_that_follows_it_is_taken() -> None:
    recording = of_experts(routing(160, EVEN, sticky=0.9), BLOCKS, KEYS)
    chosen = select(recording, 20)
    assert chosen.hit_rate is not None
    assert chosen.choice.kind in ("lru", "importance", "aged")
    assert chosen.hit_rate >= chosen.lru > 0.8
    assert f"{chosen.hit_rate:.0%} in its recorded routing" in chosen.sentence


def test_without_a_recording_it_is_one_without_a_cliff() -> None:
    nothing = Recording(np.array([block for block, _ in KEYS], np.int64), ())
    assert select(nothing, 4).choice.kind == "importance"
    assert "tpi profile records it" in select(nothing, 4).sentence


def test_a_record_travels_as_bytes_and_is_told_briefly(tmp_path: Path) -> None:
    record = RoutingRecord("x", 0, np.zeros((0, 0, 0), np.uint16)).plus(routing(9, EVEN))
    assert np.array_equal(heard(record.told()), record.experts)
    deep = RoutingRecord("x", 500, np.zeros((500, 48, 8), np.uint16))
    assert len(heard(deep.told())) == 85
    assert len(record.plus(np.zeros((MOST_TOKENS, LAYERS, USED), np.uint16)).experts) == MOST_TOKENS
    for wrong in (b"", b"1234567", record.told()[:-1], bytes(8), b"\1" * 9):
        with pytest.raises(ModelError, match="damaged"):
            heard(wrong)
    save_routing(tmp_path / "routing.npz", record)
    loaded = load_routing(tmp_path / "routing.npz")
    assert (loaded.of, loaded.tokens) == ("x", 9)
    assert np.array_equal(loaded.experts, record.experts)
    (tmp_path / "routing.npz").write_bytes(b"PK nothing")
    with pytest.raises(ModelError, match=r"routing\.npz cannot be used"):
        load_routing(tmp_path / "routing.npz")


def test_hints_that_do_not_come_true_are_followed_now_and_then() -> None:
    hints = HintRecord()
    assert all(hints.follows() for _ in range(50))
    hints.note(1, 15)
    assert sum(hints.follows() for _ in range(160)) == 10
    hints.note(8, 0)
    assert all(hints.follows() for _ in range(50))
