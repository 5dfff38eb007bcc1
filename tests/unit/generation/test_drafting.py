"""Drafts: what lookup finds, how many rows pay off, and which pages drafts may take."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from master.deployment.pages import PagePool
from master.generation.batcher import Batcher, Work
from master.generation.sequence import Sequence
from master.generation.speculation.drafts import Draft
from master.generation.speculation.lookup import EarlierAnswers, ids, look_up
from master.generation.speculation.pace import ROWS, Chance, Gain, Pace, StepTimes
from tpi.kernels.spec import PAGE_TOKENS

NOTHING = ids(array("i"))


def drafted(text: list[int], most: int = 4, earlier: list[int] | None = None) -> tuple[list[int], int]:
    return look_up(array("i", text), ids(array("i", earlier or [])), most)


def test_what_followed_the_longest_match_is_drafted() -> None:
    assert drafted([1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3]) == ([4, 5, 9, 2], 3)
    assert drafted([7, 1, 2, 8, 5, 1, 2, 9, 6, 1, 2]) == ([9, 6, 1, 2], 2)  # of equal lengths, the latest
    assert drafted([1, 2, 3]) == ([], 0)
    assert drafted([]) == drafted([1]) == ([], 0)


def test_a_text_that_repeats_itself_goes_on() -> None:
    assert drafted([5, 1, 2, 1, 2, 1, 2], 5) == ([1, 2, 1, 2, 1], 4)
    assert drafted([3, 3, 3, 3], 3)[0] == [3, 3, 3]


def test_earlier_answers_count_if_they_match_longer() -> None:
    assert drafted([1, 2, 3], earlier=[8, 1, 2, 3, 4, 5, -1, 6, 7]) == ([4, 5], 3)
    assert drafted([9, 2, 3, 6, 2, 3], 1, earlier=[2, 3, 5]) == ([6], 2)


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(-1, 3), max_size=60), st.integers(1, 15))
def test_a_draft_follows_an_occurrence(text: list[int], earlier: list[int], most: int) -> None:
    found, match = drafted(text, most, earlier)
    assert len(found) <= most
    assert -1 not in found
    if match:
        end, longest = text[len(text) - min(match, 16) :], [*earlier, None, *text, *found]
        starts = [at for at in range(len(longest)) if longest[at : at + len(end)] == end]
        assert any(longest[at + len(end) : at + len(end) + len(found)] == found for at in starts)


def test_answers_are_kept_apart_and_the_oldest_are_forgotten() -> None:
    kept = EarlierAnswers()
    kept.keep(b"a", array("i", [1, 2, 3]))
    kept.keep(b"a", array("i", [4]))
    assert kept.of(b"a").tolist() == [1, 2, 3, -1, 4, -1]
    assert kept.of(b"b").tolist() == []
    for number in range(16):
        kept.keep(bytes([number]), array("i", range(70_000)))
    assert kept.of(b"a").tolist() == []
    assert len(kept.of(bytes([3]))) == 1 << 16


def test_rows_are_added_while_tokens_per_second_grow() -> None:
    pace = Pace()
    for rows, seconds in ((1, 1.0), (2, 1.1), (3, 1.2), (4, 2.0), (5, 3.5)):
        pace.learn(1, rows - 1, 1, seconds)
    assert pace.rows(1, [0.9, 0.81, 0.7, 0.6]) == 2
    assert pace.rows(1, [0.05]) == 0
    assert pace.rows(1, []) == 0
    assert pace.rows(ROWS, [1.0]) == 0


def test_a_loss_ends_drafting_for_a_while() -> None:
    pace = Pace()
    pace.learn(1, 0, 1, 1.0)
    while not pace.others.off:
        pace.learn(1, 4, 1, 3.0)
    plain = 0
    while pace.others.off:
        pace.learn(1, 0, 1, 1.0)
        plain += 1
    assert plain == 256


def test_a_plain_step_is_measured_now_and_then() -> None:
    pace = Pace()
    pace.learn(1, 0, 1, 1.0)
    for _ in range(64):
        assert pace.drafts
        pace.learn(1, 1, 2, 1.1)
    assert not pace.drafts
    pace.learn(1, 0, 1, 1.0)
    assert pace.drafts


@pytest.mark.parametrize(
    ("chance", "rows", "ahead"),
    [
        (0.7, 1.5, True),  # 0.7 x 1/8 + 0.3 = 0.39 s a token; a step of three rows gives 2.19 tokens in about 1 s
        (0.7, 0.9, True),
        (0.99, 0.1, False),  # sixteen tokens in hardly more than a second
        (0.99, 3.0, True),
        (0.05, 1.5, True),  # idle stages compute for nothing, and a right draft still saves time
    ],
)
def test_steps_of_their_own_are_compared_with_rows(chance: float, rows: float, ahead: bool) -> None:
    pace = Pace()
    pace.learn(1, 0, 1, 1.0)
    for more in range(1, ROWS):
        pace.learn(1, more, 1, 1.0 + 0.1 * rows * more)
    assert pace.runs_ahead(chance, 8, drafting=0.0) == ahead
    assert not pace.runs_ahead(chance, 8, drafting=2.0)  # the draft model is slower than the large one


def test_no_more_steps_run_ahead_than_fit_into_the_time_of_one() -> None:
    pace = Pace()
    pace.learn(1, 0, 1, 1.0)
    assert pace.most_ahead(8) == 8
    for _ in range(100):
        pace.learn_ahead(1, 0.3, True, 1, pace.others)
    assert pace.most_ahead(8) == 4
    assert pace.most_ahead(3) == 3


@pytest.mark.parametrize(("seconds", "streams", "off"), [(0.5, 1, False), (1.2, 1, True), (0.6, 2, True)])
def test_steps_that_run_ahead_end_if_they_lose_time(seconds: float, streams: int, off: bool) -> None:
    pace = Pace()
    pace.learn(1, 0, 1, 1.0)
    for _ in range(64):
        assert not pace.others.off
        pace.learn_ahead(1, seconds, True, streams, pace.others)
    assert pace.others.off == off
    assert not pace.model.off


def test_a_plain_step_is_measured_while_steps_run_ahead() -> None:
    pace = Pace()
    pace.learn(1, 0, 1, 1.0)
    for _ in range(256):
        assert pace.drafts
        pace.learn_ahead(1, 0.2, True, 1, pace.others)
    assert not pace.drafts


def test_a_step_that_runs_ahead_counts_if_its_token_is_drawn() -> None:
    pages = PagePool(3)
    batcher, sequence = Batcher(pages, 16), Sequence(0, array("i", [1, 2]))
    (first,) = batcher.pick([sequence])
    batcher.start([first])
    started = list[Work]()
    for token in (5, 6):
        ahead = batcher.ahead(sequence, token)
        assert (ahead.tokens, ahead.position) == ([token], token - 3)
        batcher.start([ahead])
        started.append(ahead)
    assert (sequence.ahead, sequence.pending) == ([5, 6], 0)
    batcher.commit([first])
    sequence.tokens.append(5)
    batcher.accept(first, 0)
    assert (sequence.ahead, sequence.pending, sequence.life) == ([6], 0, 0)
    batcher.commit([started[0]])
    sequence.tokens.append(9)
    batcher.accept(started[0], 0)
    assert (sequence.ahead, sequence.pending, sequence.life) == ([], 1, 1)
    assert not started[1].counts


def test_a_step_that_runs_ahead_leaves_the_pages_that_others_need() -> None:
    pages = PagePool(2)
    batcher, sequence = Batcher(pages, PAGE_TOKENS), Sequence(0, array("i", range(PAGE_TOKENS)))
    batcher.start(batcher.pick([sequence]))
    assert not batcher.has_room_ahead(sequence, 1)
    assert batcher.has_room_ahead(sequence, 0)


def test_chances_are_learnt() -> None:
    chance = Chance.first(2)
    assert chance.share == pytest.approx(0.25)
    for _ in range(400):
        chance.learn(True)
    assert chance.share > 0.95
    for _ in range(400):
        chance.learn(False)
    assert chance.share < 0.05


@pytest.mark.parametrize(("pages", "drafts"), [(2, 0), (4, 0), (5, 1), (6, 2)])
def test_drafts_take_only_pages_that_no_sequence_needs(pages: int, drafts: int) -> None:
    """Two sequences fill a page each. Each takes one more now, and may need another in the next step."""
    pool = PagePool(2 + pages)
    batcher = Batcher(pool, 16)
    sequences = []
    for number in range(2):
        sequence = Sequence(number, array("i", [number] * PAGE_TOKENS))
        pool.append(sequence.table, PAGE_TOKENS)
        sequence.computed, sequence.sent, sequence.announced = PAGE_TOKENS, PAGE_TOKENS, 1
        sequence.tokens.append(7)
        sequences.append(sequence)
    long = Draft(tuple(np.arange(PAGE_TOKENS).tolist()), PAGE_TOKENS * (("lookup", 8),))
    work = batcher.pick(sequences, {0: long, 1: long})
    beyond = [item for item in work if len(item.sequence.table) > 2]
    assert len(beyond) == drafts
    assert pool.free == pages - 2 - len(beyond)
    for item in work:
        assert item.count <= PAGE_TOKENS * (len(item.sequence.table) - 1)
        assert item.tokens == [7, *item.drafted]
    batcher.start(work)
    batcher.commit(work)
    assert [each.computed for each in sequences] == [PAGE_TOKENS + 1] * 2
    sequences[0].tokens.extend([0, 1, 5])
    batcher.accept(work[0], 2)
    assert sequences[0].computed == PAGE_TOKENS + 3


def test_a_draft_model_goes_on_while_tokens_per_second_grow() -> None:
    pace = Pace()
    pace.times.learn(1, 1.0)
    pace.times.learn(2, 1.1)
    assert pace.continues(1, [], [0.7], 0.0)  # the model's speed is not known yet
    pace.drafting.learn(1, 0.2)
    assert pace.continues(1, [], [0.7], 0.0)
    assert not pace.continues(1, [], [0.2], 0.0)
    assert not pace.continues(1, [0.7], [0.1], 0.2)
    assert not pace.continues(1, [1.0] * (ROWS - 1), [1.0], 0.2)
    pace.drafting = StepTimes()
    pace.drafting.learn(1, 1.0)
    assert not pace.continues(1, [], [0.7], 0.0)


def test_a_draft_model_that_loses_rests_while_other_drafts_go_on() -> None:
    pace = Pace()
    pace.learn(1, 0, 1, 1.0)
    while not pace.model.off:
        pace.learn(1, 2, 2, 1.2, 2.0)
    assert not pace.others.off
    for _ in range(256):
        assert pace.model.off
        pace.learn(1, 0, 1, 1.0)
    assert not pace.model.off


def test_pauses_of_a_draft_model_grow_until_it_saves_time() -> None:
    pace, pauses = Pace(), list[int]()
    pace.learn(1, 0, 1, 1.0)

    def pause(gain: Gain, drafting: float | None) -> int:
        while not gain.off:
            pace.learn(1, 2, 2, 1.2, drafting)
        count = 0
        while gain.off:
            pace.learn(1, 0, 1, 1.0)
            count += 1
        return count

    for _ in range(6):
        pauses.append(pause(pace.model, 2.0))
    assert pauses == [256, 512, 1024, 2048, 4096, 4096]
    for _ in range(32):  # two tokens each, in 0.7 of the time of two steps
        pace.learn(1, 2, 2, 1.2, 0.2)
    assert not pace.model.off
    assert pause(pace.model, 2.0) == 256


def test_the_speed_of_a_draft_model_is_measured_again_after_4096_tokens_of_pauses() -> None:
    pace = Pace()
    pace.times.learn(1, 1.0)
    pace.drafting.learn(1, 3.0)
    for _ in range(4):
        pace.rest()
        assert not pace.continues(1, [], [0.7], 0.0)
    pace.rest()
    assert pace.continues(1, [], [0.7], 0.0)
