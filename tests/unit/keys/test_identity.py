"""Keys as text and as files: complete or refused, made once, readable by their owner only."""

import json
import stat
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpi.errors import UsageError
from tpi.keys import identity
from tpi.keys.identity import FILE, Identity, load_identity
from tpi.keys.text import KEY_BYTES, key_text, parse_key, short_key

Key = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)


@given(Key)
def test_a_key_is_read_as_it_was_written(key: bytes) -> None:
    assert parse_key(key_text(key)) == key
    assert parse_key(f"  {key_text(key).upper().replace('-', ' ')} ") == key
    assert key_text(key).startswith(short_key(key))


@given(Key, st.integers(0, 51), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_another_letter_is_another_key_or_none(key: bytes, at: int, letter: str) -> None:
    letters = key_text(key).replace("-", "")
    changed = letters[:at] + letter + letters[at + 1 :]
    if changed == letters:
        return
    try:
        assert parse_key(changed) != key
    except UsageError:
        assert at == 51  # the last letter has bits to spare, which are 0


@pytest.mark.parametrize("text", ["", "abcd", "1" * 52, "a" * 51, "a" * 53, "ä" * 52])
def test_what_is_no_whole_key_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a whole key"):
        parse_key(text)


def test_an_identity_is_made_once_by_concurrent_callers(tmp_path: Path) -> None:
    found: list[Identity] = []
    threads = [Thread(target=lambda: found.append(load_identity(tmp_path / "new"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({one.public for one in found}) == 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE]
    assert load_identity(tmp_path / "new") == found[0]
    assert load_identity(tmp_path / "other") != found[0]


def test_the_secret_is_for_its_owner_alone_and_in_no_log(tmp_path: Path) -> None:
    made = load_identity(tmp_path)
    path = tmp_path / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key_text(made.secret) in path.read_text()
    assert key_text(made.secret) not in repr(made)
    path.chmod(0o640)
    with pytest.raises(UsageError, match=r"other users can read.*chmod 600"):
        load_identity(tmp_path)


@pytest.mark.parametrize("field", ["public", "secret"])
def test_a_damaged_identity_is_refused(tmp_path: Path, field: str) -> None:
    load_identity(tmp_path)
    path = tmp_path / FILE
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {field: key_text(bytes(range(32)))}))
    with pytest.raises(UsageError, match="is damaged"):
        load_identity(tmp_path)
    path.write_text("{")
    with pytest.raises(UsageError, match="is damaged"):
        load_identity(tmp_path)


def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="TPI_CONFIG"):
        load_identity(tmp_path / "file")


def test_the_wheel_brings_libsodium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity.require_curve()
    monkeypatch.setattr(identity, "_has_sodium", lambda: False)
    with pytest.raises(UsageError, match="without libsodium"):
        load_identity(tmp_path)
