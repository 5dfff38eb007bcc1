"""Profiles: what is counted, what is stored, and the figures that follow."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from master.profiling.plot import figure
from tpi.errors import ModelError
from tpi.sparsity import usage
from tpi.sparsity.usage import Active, NeuronProfile, cumulative, hot_share, load_profile, pack_bits, save_profile


def drawn(tokens: int, seed: int = 0) -> Active:
    """Return two layers of 13 neurons; in the second, each active neuron has the next number."""
    first = np.random.default_rng(seed).random((tokens, 13)) < np.linspace(0.9, 0.05, 13)
    return np.stack([first, np.roll(first, 1, axis=1)])


def used(*pieces: Active) -> NeuronProfile:
    use = NeuronProfile.empty("this", 2, 13)
    for active in pieces:
        use = use.extended(active.sum(axis=1), pack_bits(active))
    return use


def test_pieces_add_up_and_come_back(tmp_path: Path) -> None:
    pieces = drawn(40), drawn(30, 1)
    together = np.concatenate(pieces, axis=1)
    save_profile(tmp_path / "p", used(*pieces))
    kept = load_profile(tmp_path / "p")
    assert (kept.of, kept.tokens, kept.layers) == ("this", 70, 2)
    assert (kept.counts == together.sum(axis=1)).all()
    for layer in range(2):
        assert (kept.active(layer) == together[layer]).all()


def test_no_more_tokens_are_kept_than_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "SAMPLE", 50)
    use = used(drawn(40), drawn(30, 1), drawn(5, 2))
    assert use.bits.shape[1] == 50
    assert use.tokens == 75


def test_what_always_comes_together_is_foretold() -> None:
    random = np.random.default_rng(3).random((2, 400, 13)) < 0.2
    assert used(drawn(400)).foretold(0, 1) == pytest.approx(1.0)
    assert used(random).foretold(0, 1) < 0.5


def test_the_curve_of_figure_5() -> None:
    counts = np.array([0, 80, 10, 10, 0])
    assert cumulative(counts).tolist() == [0.8, 0.9, 1, 1, 1]
    assert hot_share(counts) == 0.2
    assert hot_share(np.zeros(4, np.int64)) == 0


def test_the_plot_has_a_curve_for_each_layer_and_one_for_all() -> None:
    import xml.etree.ElementTree as ElementTree

    lines = ElementTree.fromstring(figure(used(drawn(50)))).findall("{*}polyline")
    assert len(lines) == 3
    points = [tuple(map(float, pair.split(","))) for pair in (lines[0].get("points") or "").split()]
    assert all(b[0] > a[0] and b[1] <= a[1] for a, b in pairwise(points))


@pytest.mark.parametrize("damage", [b"", b"PK", b"x" * 100])
def test_a_damaged_profile_is_refused(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "p").write_bytes(damage)
    with pytest.raises(ModelError, match="profile the model again"):
        load_profile(tmp_path / "p")


def test_a_profile_cut_short_is_refused(tmp_path: Path) -> None:
    save_profile(tmp_path / "p", used(drawn(40)))
    whole = (tmp_path / "p").read_bytes()
    for end in range(0, len(whole), 97):
        (tmp_path / "p").write_bytes(whole[:end])
        with pytest.raises(ModelError, match="cannot be used"):
            load_profile(tmp_path / "p")
