"""Many random models of every family, in TPI and in a reference: the tests, with ten times as many draws."""

from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.result import Check, Result, Row, Table
from tests.support.differential import differential, gguf_differential, gguf_draws

DRAWS = 500  # of each family
NOTES = f"""
Random models are computed by TPI and by transformers. Each has a config.json in which every field of the family's
config class has a random value, is absent or is null. Some fields and tensors are missing or superfluous, and weights
are random. TPI must either refuse the model by name, or compute f32 logits that differ from those of transformers by at
most {differential.TOLERANCE:g} of the largest logit. *Invalid* models are those that transformers itself does not run.
The same is done for GGUF files with random values for every metadata key. Their reference is a plain computation in
float64 that follows llama.cpp's interpretation of the keys.
"""


def bench(quick: bool) -> Result:
    """Count the random models that agree with transformers, are refused or invalid, in one row per architecture."""
    with TemporaryDirectory() as directory:
        draws = dict.fromkeys(differential.ARCHITECTURES, 10 if quick else DRAWS)
        tally = differential.run(draws, Path(directory))
        gguf = gguf_differential.run(range(80 if quick else 10 * DRAWS), Path(directory))
    rows: list[Row] = [
        {"architecture": name, "equal": tally.ran[name], "refused": tally.refused[name], "invalid": tally.invalid[name]}
        for name in differential.ARCHITECTURES
    ]
    files: list[Row] = [
        {"architecture": name, "equal": gguf.ran[name], "refused": gguf.refused[name]} for name in gguf_draws.NAMES
    ]
    checks = [
        Check("configurations with other logits than transformers", len(tally.wrong), 0, at_most=True),
        Check("GGUF files with other logits than their meaning", len(gguf.wrong), 0, at_most=True),
    ]
    notes = NOTES + "".join(f"\nDiffers: {text}\n" for text in [*tally.wrong[:10], *gguf.wrong[:10]])
    tables = [Table("What became of the draws", rows), Table("GGUF files", files)]
    return Result("Random configurations", notes, tables, checks, timed=False)
