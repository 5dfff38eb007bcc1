"""The engines to compare, each in a process of its own that stays alive between turns.

The child (`python -m benchmarks.support.engines SPEC`) prints `ready`, then answers each line `PROMPT GENERATE` with a
JSON object: the seconds until the first token after a prompt of PROMPT tokens, and the seconds of the GENERATE tokens
after it. All decoding is greedy.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.machine import MIB, status_bytes

ROOT = Path(__file__).parents[2]
CONTEXT = 1024
WARM_UP = (128, 4)  # tokens of prompt, tokens made
Tokens = Sequence[int]
Generator = Callable[[Tokens, int], Iterator[int]]  # returns the requested number of greedy tokens after a prompt


@dataclass(frozen=True)
class Spec:
    """One engine: `kind` is tpi, llama.cpp or transformers.

    `threads` are those of each node; TPI has `local` workers.
    """

    kind: str
    model: str
    threads: int
    local: int = 0
    flash: bool = False  # llama.cpp's fused attention


@dataclass(frozen=True)
class Turn:
    """Tokens per second of one measurement."""

    prefill: float
    decode: float


Turns = dict[tuple[int, int], dict[str, list[Turn | None]]]


class Engine:
    """The parent's end of one engine."""

    def __init__(self, spec: Spec) -> None:
        command = [sys.executable, "-m", "benchmarks.support.engines", json.dumps(asdict(spec))]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=ROOT
        )
        self.about: str = self._line()["about"]

    def measure(self, prompt: int, generate: int) -> Turn:
        """Process `prompt` tokens, then generate the first and `generate` more; return both speeds."""
        assert self._process.stdin
        self._process.stdin.write(f"{prompt} {generate}\n")
        self._process.stdin.flush()
        said = self._line()
        return Turn(prompt / said["prefill_s"], generate / said["decode_s"])

    def memory(self) -> float:
        """Return the peak resident memory of the process, in MiB."""
        return status_bytes(self._process.pid, "VmHWM") / MIB

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"an engine ended early, saying: {self._log.read()[-2000:]}")
        fields: dict[str, Any] = json.loads(line)
        return fields


@contextmanager
def engines(specs: Mapping[str, Spec]) -> Iterator[dict[str, Engine]]:
    """Start all engines one after the other, so that none disturbs another's loading, and warm them up."""
    running: dict[str, Engine] = {}
    try:
        for name, spec in specs.items():
            running[name] = Engine(spec)
        for engine in running.values():
            engine.measure(*WARM_UP)
        yield running
    finally:
        for engine in running.values():
            engine.close()


def take_turns(running: Mapping[str, Engine], rounds: int, work: Sequence[tuple[int, int]], rarely: str = "") -> Turns:
    """Measure all of `work`, pairs of prompt and generated tokens, with every engine in turn.

    The result is `turns[work][engine][round]`. The slow engine called `rarely` is measured in every third round only
    and has None for the others.
    """
    turns: Turns = {item: {name: [] for name in running} for item in work}
    for number in range(rounds):
        for name, engine in running.items():
            for item in work:
                skipped = name == rarely and number % 3
                turns[item][name].append(None if skipped else engine.measure(*item))
    return turns


# ---- the child ----


@contextmanager
def open_tpi(spec: Spec) -> Iterator[tuple[Generator, dict[str, Any]]]:
    """Open a session on this machine as the commands do."""
    from master.options import RunOptions
    from master.session import Session
    from master.vocabulary.sampler import Sampler, Sampling
    from tests.support.generating import generate as tokens_of

    greedy = Sampler(Sampling(temperature=0))
    with Session(RunOptions(spec.model, local=spec.local, threads=spec.threads, context=CONTEXT)) as session:

        def generate(prompt: Tokens, count: int) -> Iterator[int]:
            sequence = session.engine.admit(prompt)
            for sampled in tokens_of(session.engine, sequence, greedy, count):
                yield sampled.token
            session.engine.release(sequence)

        yield generate, {"about": session.figures.describe()}


@contextmanager
def open_llama(spec: Spec) -> Iterator[tuple[Generator, dict[str, Any]]]:
    """Open llama.cpp through its C interface, at one Python call a token; only the last token has logits."""
    import llama_cpp as lib

    model = lib.Llama(
        spec.model, n_ctx=CONTEXT, n_batch=512, n_threads=spec.threads, n_threads_batch=spec.threads,
        flash_attn=spec.flash, verbose=False,
    )  # fmt: skip
    context, vocab = model.ctx, model.n_vocab()

    def decode(tokens: Tokens) -> int:
        array = (lib.llama_token * len(tokens))(*tokens)
        if lib.llama_decode(context, lib.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError("llama_decode failed")
        return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), shape=(vocab,)).argmax())

    def generate(prompt: Tokens, count: int) -> Iterator[int]:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        yield (token := decode(prompt))
        for _ in range(count - 1):
            yield (token := decode([token]))

    features = lib.llama_print_system_info().decode().rstrip(" |")
    yield generate, {"about": f"llama-cpp-python {lib.__version__} ({features})"}


@contextmanager
def open_transformers(spec: Spec) -> Iterator[tuple[Generator, dict[str, Any]]]:
    """Open transformers in float32 on the dequantised GGUF; only the last token has logits."""
    import torch
    import transformers

    torch.set_num_threads(spec.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = Path(spec.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.eval()

    def generate(prompt: Tokens, count: int) -> Iterator[int]:
        cache, tokens = transformers.DynamicCache(config=model.config), list(prompt)
        for _ in range(count):
            with torch.inference_mode():
                out = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens = [int(out.logits[0, -1].argmax())]
            yield tokens[0]

    yield generate, {"about": f"transformers {transformers.__version__}, torch {torch.__version__}, float32"}


OPENERS = {"tpi": open_tpi, "llama.cpp": open_llama, "transformers": open_transformers}


def timed(generate: Generator, prompt: int, count: int) -> dict[str, float]:
    """Return the seconds until the first of `count` + 1 tokens, and the seconds of the others."""
    tokens = np.random.default_rng(prompt).integers(100, 10_000, prompt).tolist()
    started = first = time.perf_counter()
    for number, _ in enumerate(generate(tokens, count + 1)):
        if number == 0:
            first = time.perf_counter()
        last = time.perf_counter()
    return {"prefill_s": first - started, "decode_s": last - first}


def serve(spec: Spec) -> None:
    """Answer the lines of stdin until it ends. What the libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with OPENERS[spec.kind](spec) as (generate, about):
        print(json.dumps(about), file=answers, flush=True)
        for line in sys.stdin:
            prompt, count = map(int, line.split())
            print(json.dumps(timed(generate, prompt, count)), file=answers, flush=True)


if __name__ == "__main__":
    serve(Spec(**json.loads(sys.argv[1])))
