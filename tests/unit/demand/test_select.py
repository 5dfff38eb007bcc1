"""The policy that a node chooses from its own routing: it never finds nothing; and hints that are wrong."""

from pathlib import Path

import numpy as np
import pytest

from scheduler.demand.choice.replay import Recording, hits_by_step, replay
from scheduler.demand.choice.sample import MOST_USES, sample_layers
from scheduler.demand.choice.select import (
    ROBUST_POLICY,
    WINDOWS,
    _of_all,
    candidates,
    clear_gain,
    recording_of_experts,
    replay_all,
    select,
)
from scheduler.demand.loads import HintAccuracy
from scheduler.demand.policies import PolicyChoice
from tpi.errors import ModelError
from tpi.pack.routing import MAX_SENT_BYTES, MAX_TOKENS, RoutingRecord, from_bytes, load_routing, save_routing

LAYERS, EXPERTS, USED = 4, 16, 2
KEYS = [(2 * layer + 1, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
BLOCKS = [1, 3, 5, 7]


def routing(tokens: int, weights: np.ndarray, sticky: float = 0.0, seed: int = 0) -> np.ndarray:
    """Return experts drawn by `weights`, or with probability `sticky` those of the previous token."""
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
    recording = recording_of_experts(experts, [1, 3], [(1, 1), (1, 3), (3, 5)])
    assert [[use.tolist() for use in step] for step in recording.steps] == [[[1, 0]]]
    assert recording.blocks.tolist() == [1, 1, 3]


def test_a_small_cache_counts_uses_and_is_never_lru() -> None:
    recording = recording_of_experts(routing(120, SKEWED), BLOCKS, KEYS)
    for slots in (4, 5, 7):
        chosen = select(recording, slots)
        assert chosen.choice.kind != "lru"
        assert chosen.hit_rate is not None
        assert chosen.lru < chosen.hit_rate <= chosen.best


@pytest.mark.parametrize("tokens", [160, 1600])
def test_a_policy_that_follows_the_last_token_is_taken(tokens: int) -> None:
    """LRU if there is room for little more than a token's units, importance if there is more."""
    recording = recording_of_experts(routing(tokens, EVEN, sticky=0.5), BLOCKS, KEYS)
    for slots, kind in ((9, "lru"), (20, "importance")):
        chosen = select(recording, slots)
        assert chosen.choice.kind == kind
        assert chosen.hit_rate is not None
        assert chosen.hit_rate >= chosen.lru > 0.5
        tried = replay_all(recording, slots)
        assert tried is not None
        assert chosen.hit_rate == max(tried.found.values()) > tried.found[ROBUST_POLICY] + 0.2
        assert f"{chosen.hit_rate:.0%} hits in the recorded routing" in chosen.sentence


def test_chance_in_a_short_record_changes_no_policy() -> None:
    """Experts are drawn by fixed weights, so the best policy for few tokens is best by chance."""
    ahead = 0
    for seed in range(12):
        recording = recording_of_experts(routing(60, SKEWED, seed=seed), BLOCKS, KEYS)
        tried = replay_all(recording, 20)
        assert tried is not None
        ahead += max(tried.found.values()) > tried.found[ROBUST_POLICY]
        assert select(recording, 20).choice == ROBUST_POLICY
    assert ahead > 3


def test_a_record_too_short_for_windows_gets_the_robust_policy() -> None:
    recording = recording_of_experts(routing(2 * WINDOWS - 2, EVEN, sticky=0.9), BLOCKS, KEYS)
    assert select(recording, 20).choice == ROBUST_POLICY


def test_a_gain_is_clear_if_windows_agree() -> None:
    robust = np.linspace(0.4, 0.6, WINDOWS)
    noise = np.array([0.05, -0.05] * (WINDOWS // 2))
    assert clear_gain(robust + 0.01, robust) == pytest.approx(0.01)
    assert clear_gain(robust + 0.01 + noise, robust) < 0
    assert 0 < clear_gain(robust + 0.1 + noise, robust) < 0.1
    assert clear_gain(robust - 0.01, robust) < 0
    assert clear_gain(robust[1:] + 0.5, robust[1:]) == 0


def test_a_pinning_policy_is_chosen_by_some_layers_for_all() -> None:
    """Each layer uses a few experts three times of four, and the others in turn.

    LFU cannot tell these apart in time.
    """
    layers, keys = 40, [(layer, expert) for layer in range(40) for expert in range(EXPERTS)]
    favourites = np.tile(np.arange(USED, dtype=np.uint16), (1600, layers, 1))
    others = (np.arange(1600) * USED)[:, None] % (EXPERTS - USED) + USED + np.arange(USED)
    favourites[::4] = others[::4, None, :]
    recording = recording_of_experts(favourites, range(layers), keys)
    whole = next(one for one in candidates(recording, 200) if one.kind == "pins")
    assert len(whole.pinned) == 100
    some, room = sample_layers(recording, 200)
    assert len(some.uses) <= MOST_USES < len(recording.uses)
    part = next(one for one in candidates(some, room) if one.kind == "pins")
    assert _of_all(part, recording, 200) == whole


def test_evenly_spread_layers_behave_as_all_layers_do() -> None:
    """Layers differ in how uneven their routing is; there is room for a quarter of the experts."""
    layers, random = 12, np.random.default_rng(3)
    keys = [(layer, expert) for layer in range(layers) for expert in range(EXPERTS)]
    weights = [decay ** np.arange(EXPERTS) for decay in np.linspace(0.6, 0.95, layers)]
    drawn = [[random.choice(EXPERTS, USED, replace=False, p=w / w.sum()) for w in weights] for _ in range(400)]
    recording = recording_of_experts(np.array(drawn, np.uint16), range(layers), keys)
    some, room = sample_layers(recording, len(keys) // 4, 1600)
    assert (len(some.uses), len(np.unique(some.blocks)), room) == (1600, 4, len(keys) // 12)
    whole, part = replay_all(recording, len(keys) // 4), replay_all(some, room)
    assert whole is not None
    assert part is not None
    for kind in ("lru", "aged", "importance"):
        found, of_all = part.found[PolicyChoice(kind)], whole.found[PolicyChoice(kind)]
        assert found == pytest.approx(of_all, abs=0.03)
    assert sample_layers(recording, 9) == (recording, 9)


def test_both_halves_are_counted_in_one_pass() -> None:
    recording = recording_of_experts(routing(80, SKEWED, sticky=0.3), BLOCKS, KEYS)
    seen = Recording(recording.blocks, recording.steps[:40])
    for choice in candidates(seen, 20):
        hits = hits_by_step(recording, choice.open(recording.blocks), 20)
        assert hits[:40].sum() == replay(seen, choice.open(seen.blocks), 20).hits
        tried = replay_all(recording, 20)
        assert tried is not None
        assert tried.found[choice] == hits[40:].sum() / (40 * LAYERS * USED)
        assert tried.windows[choice].mean() == pytest.approx(tried.found[choice])


def test_without_a_recording_it_is_one_without_a_cliff() -> None:
    nothing = Recording(np.array([block for block, _ in KEYS], np.int64), ())
    assert select(nothing, 4).choice.kind == "importance"
    assert "tpi profile records it" in select(nothing, 4).sentence


def test_a_record_travels_as_bytes(tmp_path: Path) -> None:
    record = RoutingRecord("x", 0, np.zeros((0, 0, 0), np.uint16)).extended(routing(9, EVEN))
    assert np.array_equal(from_bytes(record.to_bytes()), record.experts)
    assert len(record.extended(np.zeros((MAX_TOKENS, LAYERS, USED), np.uint16)).experts) == MAX_TOKENS
    for wrong in (b"", b"1234567", record.to_bytes()[:-1], bytes(8), bytes(12), b"\1" * 13):
        with pytest.raises(ModelError, match="damaged"):
            from_bytes(wrong)
    save_routing(tmp_path / "routing.npz", record)
    loaded = load_routing(tmp_path / "routing.npz")
    assert (loaded.of, loaded.tokens) == ("x", 9)
    assert np.array_equal(loaded.experts, record.experts)
    (tmp_path / "routing.npz").write_bytes(b"PK nothing")
    with pytest.raises(ModelError, match=r"routing\.npz cannot be used"):
        load_routing(tmp_path / "routing.npz")


@pytest.mark.parametrize(("layers", "used", "experts", "width"), [(48, 8, 128, 1), (61, 8, 256, 1), (48, 10, 512, 2)])
def test_a_deep_models_record_is_told_by_thousands_of_tokens(layers: int, used: int, experts: int, width: int) -> None:
    """A sample of eight evenly spaced runs takes few bytes; of a short record, all tokens are used."""
    kept = np.zeros((8192, layers, used), np.uint16)
    kept[:, 0, 0] = np.arange(8192) % 256
    kept[:, 0, 1] = np.arange(8192) // 256
    kept[0, 0, 2] = experts - 1
    told = RoutingRecord("x", 8192, kept).to_bytes()
    assert len(told) <= MAX_SENT_BYTES
    tokens = from_bytes(told)
    at = tokens[:, 0, 0].astype(int) + 256 * tokens[:, 0, 1]
    assert len(at) > 1024
    assert len(told) - 12 == len(at) * layers * used * width
    ends = np.flatnonzero(np.diff(at) != 1) + 1
    assert len(ends) == 7
    assert (at[0], at[-1]) == (0, 8191)
    starts = at[np.concatenate([[0], ends])]
    assert np.ptp(np.diff(starts)) <= 1
    assert np.array_equal(from_bytes(RoutingRecord("x", 600, kept[:600]).to_bytes()), kept[:600])


def test_hints_that_do_not_come_true_are_followed_now_and_then() -> None:
    hints = HintAccuracy()
    assert all(hints.should_follow() for _ in range(50))
    hints.add(1, 15)
    assert sum(hints.should_follow() for _ in range(160)) == 10
    hints.add(8, 0)  # 9 of 24
    assert not all(hints.should_follow() for _ in range(16))
    hints.add(23, 0)
    assert all(hints.should_follow() for _ in range(50))
