"""Ten thousand mutated inputs; `python -m benchmarks fuzz` reads a million."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tests.support.cluster.message_strategies import MESSAGES
from tests.support.fuzz import fuzz as module
from tests.support.fuzz.fuzz import Fuzzed, Reader, fuzz
from tests.support.fuzz.readers import readers
from tpi.errors import ModelError
from tpi.families.rope import frequencies, scaled
from tpi.net.messages import Assign, Step
from tpi.net.questions import AskLink

INPUTS = 10_000
NAMES = ("codec", "gguf", "safetensors", "index", "config", "template")


@pytest.fixture(scope="module")
def each() -> Iterator[Sequence[Reader]]:
    with readers() as found:
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_mutated_inputs_are_read_or_refused(name: str, each: Sequence[Reader]) -> None:
    (reader,) = (one for one in each if one.name == name)
    for seed in reader.seeds:
        reader.read(seed)
    found = fuzz(reader, round(INPUTS * reader.share))
    assert not found.findings
    assert 0 < found.refused < found.inputs == round(INPUTS * reader.share)


def test_every_reader_has_its_share(each: Sequence[Reader]) -> None:
    assert tuple(reader.name for reader in each) == NAMES
    assert sum(reader.share for reader in each) == pytest.approx(1)


def test_every_message_is_mutated(each: Sequence[Reader]) -> None:
    (codec,) = (one for one in each if one.name == "codec")
    assert {type(codec.read(seed)) for seed in codec.seeds} == {*MESSAGES, Step, Assign, AskLink}


def bad(parts: tuple[bytes, ...]) -> object:
    """A reader that refuses, raises an unexpected error, takes memory, or takes long."""
    kind = parts[0][0] % 4
    if kind == 0:
        raise ModelError("refused")
    if kind == 1:
        raise KeyError("nothing")
    return b"x" * (100 << 20) if kind == 2 else sum(range(100_000))


def test_what_no_input_may_do_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = ((b"0",), (b"1",), (b"2",), (b"3",))

    def run() -> Fuzzed:
        return fuzz(Reader("bad", seeds, lambda parts: bad((parts[0] or b"0",)), 1.0), 40)

    found: Fuzzed = fuzz(Reader("bad", ((bytes(range(256)),),), lambda parts: bad(parts[0:1]), 1.0), 0)
    assert found == Fuzzed()
    found = run()
    words = " ".join(found.findings)
    assert "KeyError" in words
    assert "MiB" in words
    assert found.refused
    monkeypatch.setattr(module, "SECONDS", 1e-4)
    assert "it took" in " ".join(run().findings)


def test_an_index_whose_file_name_is_half_a_character_is_refused(each: Sequence[Reader]) -> None:
    (index,) = (one for one in each if one.name == "index")
    with pytest.raises(ModelError, match=r"names the file 'm\\ud800', which is not a valid name"):
        index.read((rb'{"weight_map": {"a": "m\ud800"}}',))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "longrope"])
@pytest.mark.parametrize("field", ["factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast"])
@pytest.mark.parametrize("value", [5e-324, 1e-30, 1e39])
def test_a_rope_scaling_that_overflows_is_refused_if_it_matters(kind: str, field: str, value: float) -> None:
    """The error says so; there are no warnings and no infinite frequencies."""
    scaling = {"factor": 8.0, "low_freq_factor": 1e-31, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}  # fmt: skip
    try:
        rope = scaled(kind, frequencies(10_000.0, 8), 10_000.0, scaling | {field: value}, 64)
    except ModelError:
        return
    assert np.isfinite([*rope.inv_freq, *rope.long, rope.scale]).all()
