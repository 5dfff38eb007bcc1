"""Many random configurations of every family, in transformers and in TPI: the test, with ten times as many draws."""

from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.result import Check, Result, Row, Table
from tests import differential

DRAWS = 500  # of each family
NOTES = f"""
A config.json with every field that the family's config class has at a random value, absent or null, some fields and
tensors too many or too few, random weights: TPI refuses it by name, or its f32 logits differ from those of transformers
by at most {differential.TOLERANCE:g} of the largest. Invalid is what transformers itself does not run.
"""


def bench(quick: bool) -> Result:
    """One row per architecture."""
    with TemporaryDirectory() as directory:
        tally = differential.run(range(10 if quick else DRAWS), Path(directory))
    rows: list[Row] = [
        {"architecture": name, "equal": tally.ran[name], "refused": tally.refused[name], "invalid": tally.invalid[name]}
        for name in differential.ARCHITECTURES
    ]
    check = Check("configurations with other logits than transformers", len(tally.wrong), 0, at_most=True)
    notes = NOTES + "".join(f"\nDiffers: {text}\n" for text in tally.wrong[:10])
    return Result("Random configurations", notes, [Table("What became of the draws", rows)], [check], timed=False)
