"""Modules that an idle worker, and a run whose pack exists, must not import: they take memory and time."""

import subprocess
import sys

WAITING = "import sys, worker.commands, worker.equipment, worker.service.daemon; print(*sys.modules)"
HEAVY = {
    "torch", "transformers", "scipy", "pyopencl", "triton", "rich", "jinja2", "tokenizers", "gguf", "safetensors",
    "psutil", "subprocess", "shutil", "statistics", "fractions", "decimal",
}  # fmt: skip


def loaded(program: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()


def test_a_worker_that_waits_has_loaded_nothing_heavy() -> None:
    modules = set(loaded(WAITING))
    names = {name.partition(".")[0] for name in modules}
    assert {"numpy", "zmq", "worker"} <= names
    assert not names & HEAVY
    assert not modules & {"numpy.random", "allreduce._mailbox", "worker.plan.choose", "scheduler.model.offload"}


def test_a_session_that_has_a_pack_loads_no_families() -> None:
    names = loaded("import sys, master.commands, master.session, tpi.pack.builder.repair; print(*sys.modules)")
    assert "master.deployment.deploy" in names
    assert not {"ssl", "urllib.request"} & set(names)
    assert not [name for name in names if name.startswith(("tpi.families.huggingface", "tpi.families.table"))]
    assert not [name for name in names if name.startswith("tpi.sources.quantised.gptq")]
