"""Commands of TPI that benchmarks run in processes of their own."""

import json
import subprocess
import sys
from typing import Any

TPI = (sys.executable, "-m", "tpi.cli")


def bench_process(model: str, *flags: str, context: int, prompt: int, generate: int) -> dict[str, Any]:
    """Run `tpi bench --json` once on `model` with the given numbers of tokens, and return its fields."""
    lengths = ["--prompt-tokens", str(prompt), "--gen-tokens", str(generate), "--repeat", "1"]
    command = [*TPI, "bench", "-m", model, "-c", str(context), *lengths, *flags, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    fields: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return fields
