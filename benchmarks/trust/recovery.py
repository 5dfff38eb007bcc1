"""`python -m benchmarks.trust.recovery --kills 200 --freezes 100`: faults at random moments, three workers, one answer.

Every answer must equal the answer without a fault. A recovery is the longest pause between two tokens of an answer
during which a fault happened.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from time import monotonic

from benchmarks.result import Check, Result, Table
from benchmarks.trust.strikes import WORKERS, Recoveries, checks, rows, striking
from master.options import RunOptions
from master.session import Session
from tests.support.house import Laptop, house, timed_answer, until
from tests.support.models import make_model

NOTES = """
A tiny model on a master and three workers of this machine, one answer of 60 tokens at a time. During the answer, at a
moment drawn by seed, one worker is killed, or is frozen and woken after the answer. Every answer must have the tokens
of an answer without a fault. Figures are seconds of the longest pause between two tokens, and seconds from the fault
until the master reports it.
"""
PROMPT, LENGTH = [5, 6, 7, 8], 60
_FULL, _QUICK = {"kill": 200, "freeze": 100}, {"kill": 6, "freeze": 3}


def struck(session: Session, laptops: list[Laptop], seed: int, kind: str, said: list[float]) -> tuple[list[int], float]:
    """Strike a worker during an answer, then restore it. Return the answer's tokens and its longest pause in seconds.

    `said` holds the times at which the master reported that it goes on without a worker. The function replaces them by
    the delay of the first report after the fault.
    """
    with striking(kind, laptops, seed, LENGTH) as (strike, heard):
        spoken = timed_answer(session, PROMPT, LENGTH, heard)
    strike.undo()
    cluster = session._cluster
    until(lambda: len(cluster.workers) + len(cluster.recruits.ready) == WORKERS)
    timed_answer(session, PROMPT, 2)
    said[:] = [moment - strike.at for moment in said if moment > strike.at][:1]
    return spoken.tokens, spoken.pause


def measure(root: Path, counts: dict[str, int]) -> tuple[dict[str, Recoveries], list[str]]:
    """Measure the recoveries by kind of fault, and answers without a fault.

    The result also has a message for each answer that lost or changed a token.
    """
    model = make_model("llama", root / "model")
    found, changed = {kind: Recoveries() for kind in ("none", *counts)}, list[str]()
    with house(root, WORKERS) as laptops:
        options = RunOptions(str(model.directory), workers=tuple(one.address for one in laptops), cache=root / "m")
        with Session(options) as session:
            wanted = timed_answer(session, PROMPT, LENGTH).tokens
            found["none"].pauses = [timed_answer(session, PROMPT, LENGTH).pause for _ in range(5)]
            for kind, count in counts.items():
                for seed in range(count):
                    said = _heard(session)
                    tokens, pause = struck(session, laptops, seed, kind, said)
                    changed += [f"{kind} {seed}: {tokens}, not {wanted}"] if tokens != wanted else []
                    found[kind].pauses.append(pause)
                    found[kind].noticed += said
                    print(f"{kind} {seed}: {pause:.2f} s", file=sys.stderr, flush=True)
    return found, changed


def _heard(session: Session) -> list[float]:
    """Return a list to which the moments are added at which the session reports that it goes on without a worker."""
    moments: list[float] = []

    def warn(text: str) -> None:
        if "going on with" in text:
            moments.append(monotonic())

    session._membership.warn = warn
    return moments


def bench(quick: bool) -> Result:
    """Measure 200 kills and 100 freezes, or a few of each if `quick`."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "model").mkdir()
        return result(*measure(Path(name), _QUICK if quick else _FULL))


def result(found: dict[str, Recoveries], changed: list[str]) -> Result:
    """Convert the recoveries to the result that the page shows."""
    whole = Check("answers with a token lost, repeated or changed", len(changed), 0, within=0)
    return Result("Recovery", NOTES, [Table("", rows(found))], [whole, *checks(found)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=_FULL["kill"])
    parser.add_argument("--freezes", type=int, default=_FULL["freeze"])
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "model").mkdir()
        found, changed = measure(Path(name), {"kill": flags.kills, "freeze": flags.freezes})
    for row in rows(found):
        print(row)
    print(*changed, sep="\n", file=sys.stderr)
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
