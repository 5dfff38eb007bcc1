"""`python -m benchmarks.trust.fuzz --inputs 1000000`: a million mutations of input that untrusted peers may send.

Every input must be read, or be refused with one of the project's errors, within a second of CPU time and 64 MiB.
"""

import argparse
import sys

from benchmarks.result import Check, Result, Row, Table
from tests.support.fuzz.fuzz import BYTES, SECONDS, Fuzzed, fuzz
from tests.support.fuzz.readers import readers

NOTES = """
Well-formed messages, GGUF and safetensors files, indexes, config.json files and chat templates. Each is changed in one
to six places: bits, bytes and numbers, and pieces that are removed, repeated or taken from another input. Each changed
input must be read, or be refused with an error of the project's own. Figures are the CPU seconds of the slowest input,
and the MiB that 500 inputs added to the peak memory of the process.
"""
_INPUTS, _QUICK = 1_000_000, 20_000


def measure(inputs: int, first: int = 0) -> dict[str, Fuzzed]:
    """Fuzz each reader with its share of `inputs`, numbered from `first`.

    Input `number` of a reader is the same in every run.
    """
    with readers() as each:
        return {reader.name: _told(reader.name, fuzz(reader, round(inputs * reader.share), first)) for reader in each}


def _told(name: str, found: Fuzzed) -> Fuzzed:
    print(f"{name}: {found.inputs} inputs, {len(found.findings)} findings", *found.findings, sep="\n", file=sys.stderr)
    return found


def result(found: dict[str, Fuzzed]) -> Result:
    """Convert the findings to the result that the page shows."""
    rows: list[Row] = [
        {
            "reader": name,
            "inputs": one.inputs,
            "refused": one.refused,
            "most CPU, s": one.most_s,
            "most memory, MiB": one.most_bytes / (1 << 20),
            "findings": len(one.findings),
        }
        for name, one in found.items()
    ]
    checks = [
        Check("findings", sum(len(one.findings) for one in found.values()), 0, within=0),
        Check("CPU seconds of the slowest input", max(one.most_s for one in found.values()), SECONDS, at_most=True),
        Check("bytes of 500 inputs", max(one.most_bytes for one in found.values()), BYTES, at_most=True),
    ]
    return Result("Mutated inputs", NOTES, [Table("", rows)], checks, timed=False)


def bench(quick: bool) -> Result:
    """Fuzz all readers with a million inputs, or twenty thousand if `quick`."""
    return result(measure(_QUICK if quick else _INPUTS))


def main() -> None:
    """Print the table; exit with a status other than 0 if there was a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=_INPUTS)
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    flags = parser.parse_args()
    found = result(measure(flags.inputs, flags.first))
    for row in found.tables[0].rows:
        print(row)
    sys.exit(not all(check.kept for check in found.checks))


if __name__ == "__main__":
    main()
