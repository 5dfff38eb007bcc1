"""The text for predictors: no document is in two parts, and no training text is copied from elsewhere."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.training import unseen

HELD = {f"file{number}.py": f"held out document {number}, all of it here" for number in range(40)}
SEEN = "a line that the model was trained on, long enough"


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {
        "own.py": "a line of this package alone, which is long\n", "short.py": "x = 1\n",
        "copy.py": f"{SEEN}\n", "leak.py": f"{HELD['file3.py']}\n", "other.py": "another line, which nobody else has\n",
    }  # fmt: skip
    for name, text in sources.items():
        (tmp_path / name).write_text(text)

    def named(held: bool) -> Iterator[tuple[str, str]]:
        return iter(HELD.items() if held else [("seen.py", SEEN)])

    monkeypatch.setattr(unseen, "named_documents", named)
    monkeypatch.setattr(unseen, "documents", lambda held: (text for _, text in named(held)))
    monkeypatch.setattr(unseen, "_packages", lambda: {"one"})
    monkeypatch.setattr(unseen, "_files", lambda package: [tmp_path / name for name in sources])


def test_held_out_documents_are_for_choosing_or_for_the_test() -> None:
    chosen_on, test = set(unseen.validation()), set(unseen.unseen_text().splitlines())
    assert not chosen_on & test
    assert chosen_on | test == set(HELD.values())
    assert min(len(chosen_on), len(test)) > 10


def test_what_shares_lines_with_other_texts_is_not_learned_from() -> None:
    assert [text.strip() for text in unseen.learned()] == [
        "a line of this package alone, which is long", "x = 1", "another line, which nobody else has",
    ]  # fmt: skip


def test_a_package_gives_no_more_than_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unseen, "PACKAGE", 40)
    assert len(list(unseen.learned())) == 1
    monkeypatch.setattr(unseen, "FILE", 10)
    assert [len(text) for text in unseen.learned()] == [10, 6, 10]
