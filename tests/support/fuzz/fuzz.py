"""Reading of many mutated inputs. It reports inputs that raise unexpected errors, take long, or take much memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import thread_time

import psutil

from tests.support.fuzz.mutate import Parts, mutated
from tpi.errors import TpiError
from tpi.system.machine import return_memory
from worker.profile import peak_rss, reset_peak

SECONDS, BYTES = 1.0, 64 << 20  # the most that one input may take: of this thread's CPU time, and of memory
_BATCH = 500  # inputs between two looks at the memory


@dataclass(frozen=True)
class Reader:
    """A reader of inputs of one kind; it gets the share `share` of all inputs."""

    name: str
    seeds: Sequence[Parts]  # well-formed ones
    read: Callable[[Parts], object]
    share: float


@dataclass
class Fuzzed:
    """The outcome of fuzzing. `findings` are sentences, each with the input's number."""

    inputs: int = 0
    refused: int = 0
    most_s: float = 0.0
    most_bytes: int = 0  # by which the memory grew during a batch
    findings: list[str] = field(default_factory=list)


def fuzz(reader: Reader, count: int, first: int = 0) -> Fuzzed:
    """Read `count` mutated inputs from number `first` on, and return the findings."""
    found = Fuzzed()
    for begin in range(first, first + count, _BATCH):
        numbers = range(begin, min(begin + _BATCH, first + count))
        grown = _grown(partial(_read_all, reader, numbers, found))
        found.most_bytes = max(found.most_bytes, grown)
        if grown > BYTES:
            found.findings += _large(reader, numbers)
    return found


def _read_all(reader: Reader, numbers: range, found: Fuzzed) -> None:
    for number in numbers:
        _read(reader, number, found)


def _read(reader: Reader, number: int, found: Fuzzed) -> None:
    parts = mutated(reader.seeds, reader.name, number)
    begun = thread_time()
    try:
        reader.read(parts)
    except TpiError:
        found.refused += 1
    except Exception as error:  # noqa: BLE001 - these are what is looked for
        found.findings.append(f"{reader.name} {number}: {type(error).__name__}: {str(error)[:200]}")
    took = thread_time() - begun
    found.inputs += 1
    found.most_s = max(found.most_s, took)
    if took > SECONDS:
        found.findings.append(f"{reader.name} {number}: it took {took:.2f} s")


def _large(reader: Reader, numbers: range) -> list[str]:
    """Return findings about the inputs of a batch that take too much memory, or about the batch if none does alone."""
    alone = {number: _grown(partial(_read, reader, number, Fuzzed())) for number in numbers}
    large = [f"{reader.name} {number}: {grown >> 20} MiB" for number, grown in alone.items() if grown > BYTES]
    return large or [f"{reader.name}: inputs {numbers.start} to {numbers.stop} kept {BYTES >> 20} MiB together"]


def _grown(work: Callable[[], object]) -> int:
    """Return the bytes by which this process's peak during `work` exceeded its size before."""
    return_memory()  # else what was freed before is used again, and nothing grows
    before = psutil.Process().memory_info().rss
    reset_peak()
    work()
    return max(peak_rss() - before, 0)
