"""What a worker that waits has not loaded: memory and time at the start that are not needed."""

import subprocess
import sys

WAITING = "import sys, worker.commands, worker.equipment, worker.service.daemon; print(*sys.modules)"
HEAVY = {
    "torch", "transformers", "scipy", "pyopencl", "triton", "rich", "jinja2", "tokenizers", "gguf", "safetensors",
    "psutil", "subprocess", "shutil", "statistics", "fractions", "decimal",
}  # fmt: skip


def test_a_worker_that_waits_has_loaded_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert {"numpy", "zmq", "worker"} <= loaded
    assert not loaded & HEAVY
