"""`python -m benchmarks.trust.recovery --kills 200 --freezes 100`: faults at random moments, three workers, one answer.

Every answer must be what it is without a fault. A recovery is the longest pause between two tokens of an answer that
a fault struck.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from master.options import RunOptions
from master.session import Session
from tests.support.house import Laptop, Spoken, at_random, house, speak, until
from tests.support.models import make_model

PROMPT, LENGTH = [5, 6, 7, 8], 60
WORKERS = 3


def struck(session: Session, laptops: list[Laptop], seed: int, kind: signal.Signals, within: float) -> Spoken:
    """An answer during which a worker gets a signal; then it is brought back."""
    hit: list[Laptop] = []

    def strike(drawn: random.Random) -> None:
        hit.append(drawn.choice(laptops))
        hit[0].signal(kind)

    with at_random(seed, within, strike):
        spoken = speak(session, PROMPT, LENGTH)
    hit[0].start() if kind == signal.SIGKILL else hit[0].signal(signal.SIGCONT)
    speak(session, PROMPT, 2)  # who was struck after the last token is missed now
    cluster = session._cluster
    until(lambda: len(cluster.workers) + len(cluster.recruits.ready) == WORKERS)
    speak(session, PROMPT, 2)
    return spoken


def measure(root: Path, kills: int, freezes: int) -> dict[str, list[float]]:
    """Pauses in seconds, by kind of fault; of answers without a fault, too.

    Raises:
        AssertionError: naming the seed, if a token is lost, repeated or changed.
    """
    model = make_model("llama", root / "model")
    found: dict[str, list[float]] = {"none": [], "kill": [], "freeze": []}
    with house(root, WORKERS) as laptops:
        options = RunOptions(str(model.directory), workers=tuple(one.address for one in laptops), cache=root / "m")
        with Session(options) as session:
            wanted = speak(session, PROMPT, LENGTH).tokens
            found["none"] = [speak(session, PROMPT, LENGTH).pause for _ in range(5)]
            for name, kind, count in (("kill", signal.SIGKILL, kills), ("freeze", signal.SIGSTOP, freezes)):
                for seed in range(count):
                    spoken = struck(session, laptops, seed, kind, 0.3)
                    assert spoken.tokens == wanted, f"{name}, seed {seed}: {spoken.tokens} is not {wanted}"
                    found[name].append(spoken.pause)
                    print(f"{name} {seed}: {spoken.pause:.2f} s", file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Print the percentiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--freezes", type=int, default=100)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "model").mkdir()
        found = measure(Path(name), flags.kills, flags.freezes)
    for kind, pauses in found.items():
        if len(pauses) > 1:
            cuts = statistics.quantiles(pauses, n=20, method="inclusive")
            middle, late, most = cuts[9], cuts[18], max(pauses)
            print(f"{kind}: {len(pauses)} answers, pause p50 {middle:.2f} s, p95 {late:.2f} s, most {most:.2f} s")


if __name__ == "__main__":
    main()
