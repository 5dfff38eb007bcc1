"""The threshold method on SmolLM2: with the default error the perplexity of a text stays within 2%; some are skipped.

Calibrated on one half of the text and judged on the other.
"""

import sys

import numpy as np

from master.text.tokenizer import Tokenizer
from tests.support.paths import DATA
from tests.support.perplexity import perplexity
from tpi.kernels import open_kernels
from tpi.pack.reader import Pack
from tpi.sparsity.gates import measure_curves
from tpi.sparsity.replay import chunks
from tpi.sparsity.thresholds import DEFAULT_ERROR

LENGTH = 256
SKIPPED = 0.1  # of the neurons, at least


def test_perplexity_stays_within_two_percent(pack: Pack) -> None:
    ids, kernels = chunks(Tokenizer.load(pack).encode((DATA / "quality.txt").read_text()), LENGTH), open_kernels()
    half = len(ids) // 2
    thresholds = measure_curves(pack, ids[:half], kernels).at(DEFAULT_ERROR)
    dense, sparse = (perplexity(pack, ids[half:], kernels, *given) for given in ((), (thresholds.feed_forward,)))
    shares = [layer.skipped for layer in thresholds.layers]
    share = f"{thresholds.skipped:.1%} ({min(shares):.0%} to {max(shares):.0%})"
    sys.stdout.write(f"skipped {share}, perplexity {sparse / dense:.4f} of dense\n")  # shown with -s
    assert sparse < 1.02 * dense
    assert thresholds.skipped > SKIPPED
    assert np.all(np.asarray([layer.error for layer in thresholds.layers]) <= thresholds.error)
