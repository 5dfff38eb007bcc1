"""Routing of the trained mixture: hit rates of each policy, and how often the previous layer predicts it correctly."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer

from benchmarks.result import Check, Result, Row, Table
from benchmarks.training.measure import LENGTH
from benchmarks.training.routing import Routed, routed
from scheduler.demand.choice.replay import Recording
from scheduler.demand.choice.select import recording_of_experts, replay_all
from tests.support.weights.trained import MIXTURE, UNSEEN, trained_facts, write_trained
from tpi.sparsity.replay import cut_sequences

SHARES = (1 / 8, 1 / 4, 1 / 2)  # of the experts, in memory
FORETOLD = 0.75  # "about four times in five" is what docs/experts.md expects of trained models
NOTES = """
The small mixture of experts in the tests' data ({parameters:,} parameters, {layers} layers of {experts} experts, {used}
for each token; trained on {tokens_seen:,} tokens, perplexity {perplexity} on held-out text, vocabulary of 1024). Its
routing over {tokens:,} tokens of text that is not in its training data is replayed, one token after the other. The
first half of the tokens warms the policy up. The table shows the share of the second half's uses that is found in
memory. The figures are counts, so other load on the machine does not change them.
"""
_NAMES = {"lru": "LRU", "lfu": "LFU", "aged": "aged LFU", "pins": "half pinned", "importance": "importance"}


def trained_routing(most: int = 1 << 30) -> tuple[Routed, int]:
    """Return the routing of at most `most` sequences of the tests' text, and the number of experts in a layer."""
    with TemporaryDirectory() as folder:
        directory = write_trained(Path(folder, "model"), MIXTURE)
        ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(UNSEEN.read_text()).ids
        found = routed(directory, cut_sequences(ids, LENGTH, most))
    return found, int(found.chosen.max()) + 1


def bench(quick: bool) -> Result:
    """Measure hit rates by policy and number of slots, and predictions by layer."""
    found, experts = trained_routing(4 if quick else 64)
    facts, (tokens, layers, used) = trained_facts(MIXTURE), found.chosen.shape
    keys = [(layer, expert) for layer in range(layers) for expert in range(experts)]
    recording = recording_of_experts(found.chosen, range(layers), keys)
    rows = [_row(recording, share, len(keys)) for share in SHARES]
    said: list[Row] = [
        {
            "layer": at, "chosen most": f"{one.most:.1%}", "chosen least": f"{one.least:.1%}",
            "as the token before": f"{one.again:.1%}", "predicted": "" if at == 0 else f"{one.foretold:.1%}",
        }
        for at, one in enumerate(found.layers(experts))
    ]  # fmt: skip
    right = np.mean([one.foretold for one in found.layers(experts) if one.foretold is not None])
    notes = NOTES.format(**facts | {"layers": layers, "experts": experts, "used": used, "tokens": tokens})
    tables = [Table("Found in memory", rows), Table("Layer by layer", said)]
    checks = [Check("experts predicted one layer ahead", float(right), FORETOLD)]
    return Result("Routing of a trained mixture", notes, tables, checks, timed=False)


def _row(recording: Recording, share: float, experts: int) -> Row:
    tried = replay_all(recording, int(share * experts))
    assert tried is not None
    found = {_NAMES[choice.kind]: f"{rate:.1%}" for choice, rate in tried.found.items()}
    return {"experts in memory": f"{share:.1%}", **found, "Belady": f"{tried.best:.1%}"}
