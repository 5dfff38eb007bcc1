"""Files about prompts, weights or homes are readable by their owner only, whatever the umask."""

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.storage.tune import DiskSpeed, _save
from tests.support.commands import TPI, clean
from tpi.pack.library.record import PackRecord
from tpi.system.private import make_private
from tpi.trace import write_chrome
from worker.shards.cache import ShardCache

pytestmark = pytest.mark.bare


@pytest.fixture
def lax() -> Iterator[None]:
    """Set a umask that removes no permission."""
    before = os.umask(0)
    yield
    os.umask(before)


def readable(folder: Path) -> list[str]:
    """Return the files under `folder` that other users may read, write or enter."""
    found = [path for path in folder.rglob("*") if not path.is_symlink()]
    assert found
    others = stat.S_IRWXG | stat.S_IRWXO
    return [str(path.relative_to(folder)) for path in found if path.stat().st_mode & others]


def test_what_commands_leave_is_their_owner_s(tmp_path: Path, model: str, lax: None) -> None:
    made = tmp_path / "made"
    (cache := made / "cache").mkdir(parents=True, mode=0o700)
    requests = tmp_path / "requests.jsonl"
    body = {"prompt": "1 2 3", "max_tokens": 2}
    requests.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}))
    run = ("run", "-p", "1 2", "-n", "2", "--local", "1", "--trace", str(made / "trace.json"))
    for command in (run, ("batch", str(requests), "-o", str(made / "answers.jsonl"))):
        done = subprocess.run(
            [*TPI, command[0], "-m", model, *command[1:]], capture_output=True, text=True, timeout=100, check=False,
            env=clean(cache),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert {"trace.json", "answers.jsonl"} <= {path.name for path in made.iterdir()}
    assert any(path.suffix == ".shard" for path in cache.rglob("*"))
    assert readable(made) == []


def test_what_parts_write_is_their_owner_s(tmp_path: Path, lax: None) -> None:
    """Write files under a lax umask: only their owner may read them."""
    made = tmp_path / "made"
    make_private(made)
    (made / "old.json").write_text("readable for all")
    for name in ("trace.json", "old.json"):
        write_chrome(made / name, [], zero=0)
    PackRecord(made / "a" / "b", made / "pack").save()
    _save(made / "c" / "disks.json", {"/": DiskSpeed(1, 1, 1.0)})
    ShardCache(made / "shards").close()
    assert {path.name for path in made.iterdir()} == {"a", "c", "old.json", "shards", "trace.json"}
    assert readable(made) == []
