"""TPI against transformers with accelerate's `disk_offload`, in one memory control group, page cache included.

The child process (`python -m benchmarks.memory.offload MODEL FOLDER TOKENS`) runs transformers.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.memory.budgeted import CONTEXT
from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.commands import TPI
from benchmarks.support.machine import MIB, status_bytes
from benchmarks.support.models import llama_1b_f32
from testbed.cgroups import find_hierarchies, group_directories, make_group, remove_groups
from tpi.config import default_cache
from tpi.pack.library.locate import open_model
from tpi.topology.topology import Host

LIMITS = {1 << 30: 600, 2 << 30: 1600, 6 << 30: 5000}  # bytes of the control group: MiB of --memory
PROMPT = 32  # tokens
_JOIN = 'for group in $GROUPS_TO_JOIN; do echo $$ > "$group/cgroup.procs"; done; exec "$@"'
NOTES = """
1.1B Llama shape in f32 (4.4 GB), context {context}, {prompt} tokens of prompt. Each row is one process in a memory
control group of that size. The group includes the page cache of its reads, as on a device with so much memory. TPI gets
a `--memory` that leaves room for the bare process. accelerate's offload folder is written beforehand, outside the
group. Before each process the weights are dropped from the machine's page cache, because pages that are already in it
are charged to no process. Each process has answered a prompt once before its first token is timed. `ends` is the
outcome of the process.
"""


def bench(quick: bool) -> Result:
    """Measure TPI and accelerate in control groups of several sizes."""
    model = llama_1b_f32().path
    pack = open_model(str(model), "f32", default_cache())
    folder, tokens = offload_folder(model), 2 if quick else 6
    rows: list[Row] = []
    for limit, memory in list(LIMITS.items())[: 1 if quick else None]:
        lengths = ("--prompt-tokens", str(PROMPT), "--gen-tokens", str(tokens + 1), "--repeat", "1", "--json")
        own = (*TPI, "bench", "-m", str(pack.path), "--memory", f"{memory}MiB", "-c", str(CONTEXT), *lengths)
        other = (sys.executable, "-m", "benchmarks.memory.offload", str(model), str(folder), str(tokens))
        for engine, command in (("TPI", own), ("accelerate disk_offload", other)):
            for files in (pack.path, model, folder):
                _drop_cache(files)
            rows.append(_row(limit, engine, command))
    above = float(rows[0]["above bare MiB"] or "inf") / LIMITS[1 << 30]
    checks = [Check("TPI in 1 GiB: peak RSS above the bare process, times --memory", above, 1.0, at_most=True)]
    return Result(
        "Comparison with disk offloading", NOTES.format(context=CONTEXT, prompt=PROMPT), [Table("Groups", rows)], checks
    )


@contextmanager
def group(limit: int) -> Iterator[tuple[str, ...]]:
    """Create a memory control group of `limit` bytes; yield its directories.

    Raises:
        TestbedError: if this machine has no such controller, or this user may not use it.
    """
    hierarchies, name = find_hierarchies(), f"tpi-benchmark-{os.getpid()}"
    try:
        yield make_group(hierarchies, name, Host("process", memory=limit), [])
    finally:
        remove_groups(group_directories(hierarchies, name, ["process"]))


def run_in_group(limit: int, command: Sequence[str]) -> tuple[dict[str, Any] | str, float]:
    """Run `command` in a memory control group of `limit` bytes.

    Return the command's last line as JSON, or a description of its failure; and the most MiB that the group held.
    """
    with group(limit) as folders:
        environment = os.environ | {"GROUPS_TO_JOIN": " ".join(folders)}
        joined = ["sh", "-c", _JOIN, "sh", *command]
        done = subprocess.run(joined, stdout=subprocess.PIPE, text=True, env=environment, check=False)
        lines = done.stdout.splitlines()
        if lines and not done.returncode:
            return json.loads(lines[-1]), _peak(folders)
        status = f"exit status {done.returncode}"  # 128 plus the signal, or minus the signal
        return "killed: out of memory" if _killed(folders) else status, _peak(folders)


def _drop_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _peak(folders: Sequence[str]) -> float:
    files = [Path(folder, name) for folder in folders for name in ("memory.max_usage_in_bytes", "memory.peak")]
    return max((int(file.read_text()) / MIB for file in files if file.exists()), default=0.0)


def _killed(folders: Sequence[str]) -> bool:
    """Return True if the kernel killed a process of the group for lack of memory (`oom_kill`, cgroup v1 or v2)."""
    files = [Path(folder, name) for folder in folders for name in ("memory.oom_control", "memory.events")]
    lines = [line.split() for file in files if file.exists() for line in file.read_text().splitlines()]
    return any(int(count) > 0 for name, count in lines if name == "oom_kill")


def _row(limit: int, engine: str, command: Sequence[str]) -> Row:
    found, peak = run_in_group(limit, command)
    row: dict[str, str | int | float] = {"group MiB": limit // MIB, "engine": engine, "group's peak MiB": round(peak)}
    if isinstance(found, str):
        return {**row, "ends": found, "first token s": "", "tok/s": "", "peak RSS MiB": "", "above bare MiB": ""}
    node = found["nodes"][0] if "nodes" in found else found
    return {
        **row,
        "ends": "well",
        "first token s": float(found["ttft_s"]),
        "tok/s": float(found["decode_tokens_per_s"]),
        "peak RSS MiB": round(node["peak_rss_bytes"] / MIB),
        "above bare MiB": round((node["peak_rss_bytes"] - node["bare_rss_bytes"]) / MIB),
    }


def offload_folder(model: Path) -> Path:
    """Write the weights in accelerate's on-disk format, one file per tensor, unless they exist."""
    from accelerate.utils import offload_weight, save_offload_index
    from safetensors import safe_open

    folder = model.with_name(f"{model.name}-offload")
    if (folder / "index.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                index = offload_weight(tensors.get_tensor(name), name, folder, index)
    save_offload_index(index, folder)
    return folder


def main(path: str, folder: str, tokens: int) -> None:
    """Decode greedily with every weight on disk, after one pass over the prompt; print the seconds and the peak."""
    bare = status_bytes("self", "VmHWM")
    import torch
    import transformers
    from accelerate import disk_offload, init_empty_weights

    config = transformers.AutoConfig.from_pretrained(path)
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    disk_offload(model, folder, execution_device=torch.device("cpu"))
    cache, next_ = transformers.DynamicCache(config=config), list(range(1, PROMPT + 1))
    with torch.inference_mode():
        model.eval()(torch.tensor([next_]), use_cache=False, logits_to_keep=1)
        at = [time.perf_counter()]
        for _ in range(tokens + 1):
            out = model.eval()(torch.tensor([next_]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            next_ = [int(out.logits[0, -1].argmax())]
            at.append(time.perf_counter())
    fields = {
        "ttft_s": at[1] - at[0],
        "decode_tokens_per_s": tokens / (at[-1] - at[1]),
        "peak_rss_bytes": status_bytes("self", "VmHWM"),
        "bare_rss_bytes": bare,
    }
    print(json.dumps(fields))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
