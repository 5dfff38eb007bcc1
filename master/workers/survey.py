"""The survey: the links between workers are measured before a plan, so that plans use near neighbours.

The two workers of a pair measure their link (`worker.measure.link`). Pairs without a common worker do so at the same
time.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np

from allreduce import cache
from allreduce.cache import Pair
from allreduce.measure import LEAST_S, plausible, rounds
from master.workers.asking import ask
from master.workers.cluster import Cluster
from tpi.errors import NodeError, TpiError
from tpi.keys.policy import KeyPolicy, leaves_machine
from tpi.net.questions import AskDisk, AskLink, MeasuredLink
from tpi.net.sockets import Net, split_address
from tpi.progress import phase, warn
from tpi.topology.links import Link
from worker.measure.link import REACH_S

_MOST_S = 5.0  # seconds after which no further measurement begins; only pairs that do not connect take so long
_ANSWER_S = 2.0  # seconds to wait for an answer, in addition to the time of the measurement
_DISK_S = 20.0  # seconds for the measurement of a disk; a slow disk takes ten for the file that is read
_FREE_S = 2.0  # seconds for workers to notice that they were released


class WorkerLinks:
    """The links between workers on other machines, as measured within the last day."""

    def __init__(self, file: Path | None, policy: KeyPolicy | None = None, say: Callable[[str], None] = warn) -> None:
        """Create the table, with the links in the cache `file` (None: only links that this object measures).

        `policy` has the keys for connections (None: the user's). `say` gets a sentence for each link that cannot be
        measured.
        """
        self._file, self._policy, self._say = file, policy, say
        self._found: dict[frozenset[str], Link | None] = {}  # None: could not be measured

    def between(self, ends: Sequence[str]) -> dict[Pair, Link]:
        """Return the known links between the nodes `ends`, by pairs of indices into `ends`, the lower one first.

        `ends` are the nodes' names as `allreduce.cache.end_of` makes them.
        """
        pairs = [(a, b) for b in range(len(ends)) for a in range(b)]
        found = {(a, b): self._found.get(frozenset((ends[a], ends[b]))) for a, b in pairs}
        # the file also has the links that runs measured since
        remembered = cache.load(self._file, ends) if self._file else {}
        return {pair: link for pair, link in found.items() if link} | {
            pair: one.link for pair, one in remembered.items()
        }

    def software(self, ends: Sequence[str]) -> dict[int, float]:
        """Return the seconds that software adds to an allreduce, by the number of nodes in it.

        These are earlier measurements with the master and some of the workers `ends`; empty if there are none.
        """
        return cache.software(self._file, [cache.end_of(b"", ""), *ends]) if self._file else {}

    def doubt(self, ends: Sequence[str]) -> bool:
        """Have the links between the master and the workers `ends` measured again before the next plan.

        Links that a second measurement has confirmed are left out. Return True if any link is to be measured.
        """
        everyone = [cache.end_of(b"", ""), *ends]
        own = {pair for pair in self._found if pair.issubset(everyone)}
        marked = cache.doubt(self._file, everyone) if self._file else own
        for pair in marked:
            self._found.pop(pair, None)
        return bool(marked)

    def survey_at(self, workers: Mapping[str, str], remeasure: bool = False) -> None:
        """Measure the unknown links between workers; with `remeasure`, all links.

        The workers serve this machine meanwhile; workers of another master are left out. Do nothing if no link
        is unknown.

        Args:
            workers: name in the cache of each worker, by its address (`HOST:PORT`).
            remeasure: measure the known links too.
        """
        away = {address: end for address, end in workers.items() if leaves_machine(split_address(address)[0])}
        addresses, ends = list(away), list(away.values())
        lacking = _pairs(len(ends)) if remeasure else self._lacking(ends)
        called = [addresses[index] for index in sorted({index for pair in lacking for index in pair})]
        if not called:
            return
        try:
            with phase("measuring the links between the workers"):
                with Cluster.connect(called, Net(policy=self._policy), without=lambda error: None) as cluster:
                    met = [one.address for one in cluster.workers]
                    self.survey(cluster, remeasure)
                _await_release(met, self._policy)
        except TpiError as error:
            self._say(f"the links between workers were not measured: {error}")

    def survey(self, cluster: Cluster, remeasure: bool = False) -> None:
        """Measure the unknown links between the workers of `cluster`; with `remeasure`, all links.

        This takes at most about two seconds, and one more for each pair that does not connect, up to six. Call it
        between two steps.

        Raises:
            TpiError: if the run was ended by `Cluster.break_off`.
        """
        peers = cluster.peers()[1:]
        workers, ends = cluster.workers, [cache.end_of(peer.key, peer.address) for peer in peers]
        away = {index for index, one in enumerate(workers) if leaves_machine(split_address(one.address)[0])}
        wanted = [pair for pair in (_pairs(len(ends)) if remeasure else self._lacking(ends)) if away.issuperset(pair)]
        found = measure(cluster, wanted)
        for (a, b), link in found.items():
            self._found[frozenset((ends[a], ends[b]))] = link
            if link is None:
                self._say(
                    f"the link between {workers[a].name} and {workers[b].name} cannot be measured, so they count as "
                    "far apart as the farther of them is from this machine; tpi doctor looks for a closed port"
                )
        if self._file:
            cache.save(self._file, ends, {pair: link for pair, link in found.items() if link}, {})

    def _lacking(self, ends: Sequence[str]) -> list[Pair]:
        """Return the pairs whose link is not known, without pairs whose measurement has failed before."""
        known = self.between(ends)
        return [
            (a, b)
            for a, b in _pairs(len(ends))
            if (a, b) not in known and frozenset((ends[a], ends[b])) not in self._found
        ]


def measure_disks(addresses: Sequence[str], policy: KeyPolicy | None = None) -> None:
    """Have the workers at `addresses` measure their disks, at the same time, which takes about three seconds.

    From then on they report the speed when they are asked for their condition. Those that serve another master are left
    out; `policy` has the keys for connections (None: the user's).

    Raises:
        TpiError: if the workers cannot be called.
    """
    with (
        phase("measuring the disks of the workers"),
        suppress(_LateError),
        Cluster.connect(addresses, Net(policy=policy), without=lambda error: None) as cluster,
    ):
        for worker in cluster.workers:
            cluster.ask(AskDisk(cluster.session, worker.epoch), worker)
        cluster.wait(lambda: all(one.disk for one in cluster.workers), _DISK_S, _LateError)
    _await_release(addresses, policy)


def measure(cluster: Cluster, wanted: Sequence[Pair]) -> dict[Pair, Link | None]:
    """Have the workers of `cluster` measure the links of the `wanted` pairs, which are indices into its workers.

    Returns:
        The link of each measured pair; None if the two workers do not reach each other. Pairs are left out after five
        seconds, and if a worker is lost.
    """
    turns = [[pair for pair in pairs if pair in wanted] for pairs in rounds(len(cluster.workers))]
    turns = [pairs for pairs in turns if pairs]
    found: dict[Pair, Link | None] = {}
    ends = time.monotonic() + _MOST_S
    with suppress(NodeError):  # the next deployment reports a lost worker
        for pairs in turns:
            if time.monotonic() < ends:
                found |= _measure_at_once(cluster, pairs, LEAST_S / len(turns))
    return found


def _measure_at_once(cluster: Cluster, pairs: Sequence[Pair], seconds: float) -> dict[Pair, Link | None]:
    """Measure the links of pairs that have no worker in common, all at once; return the links."""
    numbers = {pair: secrets.randbits(64) for pair in pairs}
    for (a, b), number in numbers.items():
        one, other = cluster.workers[a], cluster.workers[b]
        peers = (one.peer(0), other.peer(1))
        for rank, worker in ((1, other), (0, one)):  # the listening worker first
            cluster.ask(AskLink(cluster.session, worker.epoch, number, rank, seconds, peers), worker)

    def answered() -> bool:
        return all(_answer(cluster, index, number) for pair, number in numbers.items() for index in pair)

    with suppress(_LateError):
        cluster.wait(answered, seconds + REACH_S + _ANSWER_S, _LateError)
    return {(a, b): _link(cluster, a, number) for (a, b), number in numbers.items()}


class _LateError(TpiError):
    """Error of a measurement that workers do not finish in time."""


def _link(cluster: Cluster, index: int, number: int) -> Link | None:
    answer = _answer(cluster, index, number)
    if answer is None or not answer.latency_s or not answer.bytes_per_s:
        return None
    latency, rate = plausible(np.array([answer.latency_s, answer.bytes_per_s], np.float32)).tolist()
    return Link(latency, rate)


def _answer(cluster: Cluster, index: int, number: int) -> MeasuredLink | None:
    answer = cluster.workers[index].link
    return answer if answer and answer.number == number else None


def _pairs(count: int) -> list[Pair]:
    return [(a, b) for b in range(count) for a in range(b)]


def _await_release(addresses: Sequence[str], policy: KeyPolicy | None) -> None:
    """Wait until the workers at `addresses` no longer serve this process, because `Bye` may arrive late."""
    ends = time.monotonic() + _FREE_S
    with closing(Net(policy=policy)) as net:
        while any(one.in_use for one in ask(net, addresses)) and time.monotonic() < ends:
            pass
