"""Workers that join a master later: used if they help; a far one only once its link is repaired. Root on Linux."""

import re
import time
from pathlib import Path

import pytest

from testbed.faults import apply_fault
from tests.support.figures import assert_figures
from tests.support.home import home, home_by_cable
from tests.support.models import SIZES, write_tokenizer
from tests.support.testbed_helpers import needs_root, until

pytestmark = [needs_root, pytest.mark.waits, pytest.mark.timeout(300)]

LONG_S = 100.0
LARGE = SIZES | {"hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4,
                 "intermediate_size": 16384}  # fmt: skip


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with one layer of 100 MB, which takes a slow device longer than two sums over a cable."""
    import torch
    import transformers

    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("large")
    transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**LARGE)).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def test_a_later_worker_is_used_if_that_is_faster(large_model: Path, tmp_path: Path) -> None:
    with home(tmp_path) as (place, bed):
        place.begin(large_model)
        assert place.answer() == ["master"]
        place.start_worker("b")
        until(lambda: place.answer() == ["master", "b"], LONG_S)
        apply_fault(bed.folder, "slow", "c", latency=0.1)
        place.start_worker("c")
        until(lambda: place.answer() == ["master", "b"] and "c is not used" in place.said, LONG_S)
        apply_fault(bed.folder, "heal", "c")
        until(lambda: place.answer() == ["master", "b", "c"], LONG_S)
        apply_fault(bed.folder, "kill", "b")
        until(lambda: place.answer() == ["master", "c"], LONG_S)
        place.start_worker("b")
        until(lambda: place.answer() == ["master", "b", "c"], LONG_S)  # in its place
    (said,) = (line for line in place.said.splitlines() if "c is not used" in line)
    assert re.search(r": [^ ]+ tok/s expected without it, [^ ]+ with it \([^ ]+ ms and [^ ]+ Mbit/s away\); ", said)
    assert "Traceback" not in place.said


def test_laptop_sleeps_and_wakes_changes_address(large_model: Path, tmp_path: Path) -> None:
    """The process that slept is used within 10 s of waking: it announces its new address by multicast.

    Its old connection was lost without a message, so at first it takes the master to be connected still.
    """

    def woken(number: int) -> dict[str, float]:
        with home_by_cable(tmp_path / f"try-{number}") as (place, bed):
            place.start_worker("b")
            place.begin(large_model, "--own-pace")
            names, tokens, sent = place.ask()
            assert names == ["master", "b"], place.said
            assert sent > 0
            apply_fault(bed.folder, "freeze", "b")
            place.change_address("b", 3)
            assert place.ask()[:2] == (["master"], tokens)
            begun = time.monotonic()
            apply_fault(bed.folder, "thaw", "b")
            until(lambda: place.answer() == ["master", "b"], LONG_S)
            seconds = time.monotonic() - begun
            assert place.ask() == (["master", "b"], tokens, 0)
            assert "Traceback" not in place.said + place.output_of("b")
        return {"joined again": seconds}

    assert_figures("laptop sleeps and wakes, changes address", {"joined again": 10.0}, woken)
