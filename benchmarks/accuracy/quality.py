"""The cost of each format in quality: KL divergence, best token and perplexity on a text, next to llama.cpp."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from benchmarks.result import Check, Result, Row, Table
from benchmarks.support.gguf_copy import requantised
from benchmarks.support.models import smollm2
from master.options import RunOptions
from master.session import Session
from master.text.tokenizer import Tokenizer
from tests.support.paths import DATA
from tests.support.weights.floats import as_floats, shuffled
from tpi.config import default_cache
from tpi.pack.builder.build import OpenedSource, pack_model
from tpi.pack.reader import Pack

F32 = npt.NDArray[np.float32]
Logits = Callable[[Sequence[Sequence[int]]], Iterator[F32]]
"""`[tokens, vocab]` for each chunk of token ids, every chunk a sequence of its own."""

TEXT = DATA / "quality.txt"
CHUNK, THREADS = 512, 2  # tokens
Q4_1, Q8_0 = "GGUF Q4_1", "GGUF Q8_0"
PROMISED = {"q8": (1e-3, 1.01), "q4": (0.1, 1.05)}  # bounds: nats, and a multiple of the perplexity of f32
NOTES = f"""
SmolLM2-135M-Instruct on {TEXT.name} in chunks of {CHUNK} tokens, each a sequence of its own. The distribution of every
next token is compared with the distribution that TPI computes from the same weights in f32 (*Parity with transformers*
checks those). *KL* is the mean in nats. *Best token* is the share of tokens at which the most likely token is the same.
Perplexity is that of the text, also as a multiple of the perplexity of f32. Both engines read the same files: {Q4_1}
as published (embedding in Q8_0), and {Q8_0}, which is made from it. Packs in q8 and q4 are made from the f32 weights.
These weights come from a 4-bit file, so they lie on its grid and 4 bits lose nothing. *Off the grid* are the same
weights in another order (`tests.support.weights.floats`), as if they had never been quantised. This is the harder case,
and the realistic one.
"""


@dataclass
class Quality:
    """The quality of an engine on a text: one value of each measure for each token."""

    kl: list[float] = field(default_factory=list)  # nats
    same: list[bool] = field(default_factory=list)
    surprise: list[float] = field(default_factory=list)  # nats of the token that came

    def add(self, expected: F32, found: F32, chunk: Sequence[int]) -> None:
        """Add one chunk: expected and found log probabilities, `[tokens, vocab]`."""
        self.kl += (np.exp(expected) * (expected - found)).sum(axis=1).tolist()
        self.same += (expected.argmax(axis=1) == found.argmax(axis=1)).tolist()
        self.surprise += (-found[np.arange(len(chunk) - 1), chunk[1:]]).tolist()

    @property
    def perplexity(self) -> float:
        """Perplexity of the text."""
        return float(np.exp(np.mean(self.surprise)))


def bench(quick: bool) -> Result:
    """Measure all formats on the whole text, or two on one chunk if `quick`.

    Packs are written anew each time, because packing is measured too.
    """
    model, formats = smollm2().path, list(PROMISED)[: 1 if quick else None]
    with TemporaryDirectory(dir=default_cache()) as folder:
        grid = _packs(as_floats(model), formats, Path(folder, "grid"))
        chunks = _chunks(grid["f32"], 1 if quick else None)
        base, found = compared(_tpi(grid["f32"]), _engines(model, grid, Path(folder)), chunks)
        off = _packs(shuffled(model), formats, Path(folder, "off"))
        harder = {f"TPI, {dtype}, off the grid": _tpi(off[dtype]) for dtype in formats}
        found |= compared(_tpi(off["f32"]), harder, chunks)[1]
    rows = [_row(name, one, base) for name, one in {"TPI, f32": base, **found}.items()]
    return Result("Quality by format", NOTES, [Table("", rows)], list(_checks(found, base)), timed=False)


def _engines(model: Path, packs: dict[str, Pack], folder: Path) -> dict[str, Logits]:
    """Return the engines to compare, by name.

    These are TPI and, if it is installed, llama.cpp, each on both GGUF files, and TPI on the packs that it wrote.
    """
    files = {Q4_1: model, Q8_0: requantised(model, folder / "smollm2.Q8_0.gguf", "Q8_0")}
    engines: dict[str, Logits] = {f"TPI, {name}": partial(tpi, str(file)) for name, file in files.items()}
    if find_spec("llama_cpp"):
        engines |= {f"llama.cpp, {name}": partial(llama, file) for name, file in files.items()}
    return engines | {f"TPI, {dtype}": _tpi(pack) for dtype, pack in packs.items() if dtype != "f32"}


def _packs(opened: OpenedSource, formats: Sequence[str], folder: Path) -> dict[str, Pack]:
    for dtype in ("f32", *formats):
        pack_model(opened, dtype, folder / dtype)
    return {dtype: Pack.open(folder / dtype) for dtype in ("f32", *formats)}


def _tpi(pack: Pack) -> Logits:
    return partial(tpi, str(pack.path))


def compared(
    reference: Logits, engines: dict[str, Logits], chunks: Sequence[Sequence[int]]
) -> tuple[Quality, dict[str, Quality]]:
    """Return the quality of the reference, and of each engine compared with it, on the same chunks."""
    expected, base = [log_softmax(logits) for logits in reference(chunks)], Quality()
    for one, chunk in zip(expected, chunks, strict=True):
        base.add(one, one, chunk)
    found = {name: Quality() for name in engines}
    for name, engine in engines.items():
        for one, logits, chunk in zip(expected, engine(chunks), chunks, strict=True):
            found[name].add(one, log_softmax(logits), chunk)
    return base, found


def tpi(model: str, chunks: Sequence[Sequence[int]]) -> Iterator[F32]:
    """Yield the logits that TPI computes for each chunk. `model` is a file or a pack."""
    with Session(RunOptions(model, context=CHUNK + 1, threads=THREADS)) as session:
        for chunk in chunks:
            yield session.engine.logits(chunk)


def llama(model: Path, chunks: Sequence[Sequence[int]]) -> Iterator[F32]:
    """Yield the logits that llama.cpp computes for each chunk, from a GGUF file."""
    from llama_cpp import Llama

    engine = Llama(str(model), n_ctx=CHUNK, n_batch=CHUNK, n_threads=THREADS, logits_all=True, verbose=False)
    try:
        for chunk in chunks:
            engine.reset()
            engine.eval(list(chunk))
            yield np.array(engine.scores[: len(chunk)], np.float32)
    finally:
        engine.close()


def log_softmax(logits: F32) -> F32:
    """Return the natural logarithms of the probabilities of each row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)), np.float32)


def _chunks(pack: Pack, count: int | None) -> list[Sequence[int]]:
    ids: Sequence[int] = Tokenizer.load(pack).encode(TEXT.read_text())
    return [ids[at : at + CHUNK] for at in range(0, len(ids), CHUNK)][:count]


def _row(name: str, one: Quality, base: Quality) -> Row:
    return {
        "engine and format": name,
        "KL": float(np.mean(one.kl)),
        "best token": f"{np.mean(one.same):.1%}",
        "perplexity": one.perplexity,
        "times f32": f"{one.perplexity / base.perplexity:.4f}",
        "tokens": len(one.same),
    }


def _checks(found: dict[str, Quality], base: Quality) -> Iterator[Check]:
    for dtype, (nats, times) in PROMISED.items():
        for name in filter(found.__contains__, (f"TPI, {dtype}", f"TPI, {dtype}, off the grid")):
            one = found[name]
            yield Check(f"{name}: KL", float(np.mean(one.kl)), nats, at_most=True)
            yield Check(f"{name}: perplexity, times f32", one.perplexity / base.perplexity, times, at_most=True)
    for file in (Q4_1, Q8_0):
        if f"llama.cpp, {file}" in found:
            ratio = float(np.mean(found[f"TPI, {file}"].kl) / np.mean(found[f"llama.cpp, {file}"].kl))
            yield Check(f"{file}: KL, times llama.cpp's", ratio, 1.0, at_most=True)
