"""Many random models of every family, in TPI and in a reference: the tests, with ten times as many draws."""

from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.result import Check, Result, Row, Table
from tests.support.differential import differential, gguf_differential, gguf_draws

DRAWS = 500  # of each family
NOTES = f"""
A config.json with every field that the family's config class has at a random value, absent or null, some fields and
tensors too many or too few, random weights: TPI refuses it by name, or its f32 logits differ from those of transformers
by at most {differential.TOLERANCE:g} of the largest. Invalid is what transformers itself does not run. The same for
GGUF files with every metadata key at random, against their meaning to llama.cpp, computed plainly in float64.
"""


def bench(quick: bool) -> Result:
    """Count the drawn models that agree with transformers, that are refused and that are invalid, one row an
    architecture.
    """
    with TemporaryDirectory() as directory:
        tally = differential.run(range(10 if quick else DRAWS), Path(directory))
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
