"""Weights are sent once: the bytes sent in a run, in a recovery, and to a worker that has the files itself."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from master.options import RunOptions
from master.session import Session
from tests.support.commands import listening_worker, run_json
from tests.support.house import house, timed_answer
from tests.support.models import TinyModel
from tests.support.stillness import Stillness
from tpi.net.messages import Assign
from tpi.pack.reader import Pack


def units_of_plan(plan: Assign) -> set[tuple[bytes, str, int]]:
    """Return every unit of a node's plan."""
    return {
        (block.id, plan.layouts[run.layout].name, unit)
        for block in plan.blocks
        for run in block.runs
        for unit in range(run.first, run.last)
    }


def nbytes(plan: Assign, units: set[tuple[bytes, str, int]]) -> int:
    sizes: dict[str, int] = {layout.name: layout.unit_bytes for layout in plan.layouts}
    return sum(sizes[name] for _, name, _ in units)


def test_removing_one_worker_of_four_sends_only_what_is_missing(
    tmp_path: Path,
    tiny_model: Callable[[str], TinyModel],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    plans: list[dict[str, Assign]] = []
    with house(tmp_path, 4) as laptops:
        addresses = tuple(one.address for one in laptops)
        with Session(
            RunOptions(str(tiny_model("llama").directory), workers=addresses, cache=tmp_path / "m")
        ) as session:
            begin = session._cluster.begin

            def noted(assigned: list[Assign], source: object) -> None:
                plans.append(dict(zip((one.name for one in session._cluster.workers), assigned, strict=True)))
                begin(assigned, source)  # type: ignore[arg-type]

            before = session.figures.fields()["weights_sent_bytes"]
            assert before > 0
            session.deploy([1, 1, 1, 1, 1])
            monkeypatch.setattr(session._cluster, "begin", noted)
            session.deploy([1, 1, 1, 1, 1])
            assert session.figures.fields()["weights_sent_bytes"] == 0  # a second run of the model sends none
            with Stillness() as host:
                timed_answer(
                    session, [5, 6, 7], 8, lambda count: laptops[1].signal(signal.SIGKILL) if count == 3 else None
                )
            if host.excuses and session.names != ("master", "a", "c", "d"):
                pytest.skip(f"the host stood still for {host.longest:.1f} s: somebody else was silent, too")
            assert session.names == ("master", "a", "c", "d")
            old, new = plans[0], plans[1]
            missing = sum(nbytes(new[name], units_of_plan(new[name]) - units_of_plan(old[name])) for name in "acd")
            assert missing > 0
            assert session.figures.fields()["weights_sent_bytes"] == missing
    assert f"planned anew; {missing / 1e6:.1f} MB of weights were sent" in capfd.readouterr().err


def test_a_worker_that_has_the_files_is_sent_vectors_alone(
    tmp_path: Path, tiny_pack: Callable[..., Pack], capfd: pytest.CaptureFixture[str]
) -> None:
    pack = tiny_pack("llama")
    arguments = ("-m", str(pack.path), "-p", "Hello", "--raw", "-n", "3")
    vectors = sum(4 * length for block in pack.walk() for _, length in block.shape.vectors)
    with listening_worker(tmp_path / "w", "--model-dir", str(pack.path.parent)) as address:
        sent = run_json(*arguments, "--workers", address, cache=tmp_path / "m")["weights_sent_bytes"]
    assert sent == vectors
    with listening_worker(tmp_path / "without") as address:
        assert (
            int(str(run_json(*arguments, "--workers", address, cache=tmp_path / "m")["weights_sent_bytes"])) > vectors
        )


def test_a_directory_without_packs_is_one_sentence(tmp_path: Path) -> None:
    from tpi.errors import UsageError
    from worker.shards.nearby import NearbyPacks

    with pytest.raises(UsageError, match="holds no pack; make one there"):
        NearbyPacks(tmp_path)


def test_a_damaged_pack_is_no_harm(tmp_path: Path, tiny_pack: Callable[..., Pack]) -> None:
    import shutil

    pack = tiny_pack("llama")
    copy = tmp_path / "packs" / "copy"
    shutil.copytree(pack.path, copy)
    for path in copy.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-100:] = bytes(100)
        path.write_bytes(data)
    arguments = ("-m", str(pack.path), "-p", "Hello", "--raw", "-n", "3", "--temp", "0")
    alone = run_json(*arguments, cache=tmp_path / "m")
    with listening_worker(tmp_path / "w", "--model-dir", str(tmp_path / "packs")) as address:
        with_it = run_json(*arguments, "--workers", address, cache=tmp_path / "m")
    assert with_it["text"] == alone["text"]
