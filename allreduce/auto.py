"""Auto: a group that measures its links at the first sum, and then uses the best algorithm for each payload size."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from allreduce import cache
from allreduce.base import F32, GROUPS, Endpoints, Group, GroupSpec, GroupStats, Work, idle
from allreduce.choose import Choice, candidates, choose, contradicts
from allreduce.flight import IN_FLIGHT, Exchange
from allreduce.measure import measure_links, share
from allreduce.networked import Networked
from allreduce.predict import predict
from allreduce.transport import Transport
from tpi.topology.links import LOOPBACK, LinkTable

_FEW = 3  # most nodes on one machine for which a mesh is fastest; with more, its messages outnumber the cores
_LOCAL = ("127.", "localhost", "[::1]")


class Auto(Group):
    """A group that uses the best algorithm for each size of payload. All algorithms share the same connections.

    `choice` and `links` are None until `tune` has run.
    """

    name = "auto"

    def __init__(self, spec: GroupSpec, endpoints: Endpoints) -> None:
        super().__init__(spec)
        self.transport = Transport(spec, endpoints)
        self.groups: dict[str, Networked] = {}
        for name in candidates():
            module, kind = GROUPS[name].split(":")
            self.groups[name] = getattr(import_module(module), kind)(spec, endpoints, self.transport)
        self.links: LinkTable | None = None
        self.choice: Choice | None = None
        self._chosen: dict[int, Networked] = {}  # the group that sums payloads of so many values
        self._cache = endpoints.links_cache

    def algorithm(self, values: int) -> str:
        """Return the name of the algorithm chosen for sums of `values` values, or "auto" if `tune` has not run yet."""
        return self.choice.name_for(values) if self.choice else self.name

    def tune(self, work: Work = idle, measure_local: bool = False) -> Choice:
        """Measure the links and choose the algorithms. If that was done before, only return the choice.

        All nodes must call this together, before their first sum. Links within one machine are measured only if
        `measure_local` is True.
        """
        if self.choice is None:
            addresses = (peer.address.removeprefix("tcp://") for peer in self.spec.peers[1:])
            if not measure_local and all(address.startswith(_LOCAL) for address in addresses):
                self.links = LinkTable.uniform(self.size, LOOPBACK)
                self.choice = self._unmeasured()
            else:
                known = self._known()
                self.choice = self._chosen_by(known, work)
                if self._remembered(known) and contradicts(self.choice.predicted, self.choice.measured):
                    self.choice = self._chosen_by(known, work, doubted=True)
                if self._cache and self.rank == 0 and self.choice.software is not None:
                    cache.save_software(self._cache, cache.ends(self.spec), self.choice.software)
        return self.choice

    def predicted_s(self, values: int) -> float | None:
        """Return the predicted seconds of an allreduce of `values` values by the chosen algorithm.

        Return None if `tune` has not run yet.
        """
        return self._predicted(self.choice.name_for(values), values) if self.choice else None

    def choice_fields(self) -> dict[str, Any] | None:
        """Return the choice as JSON fields, or None if `tune` has not run yet."""
        return self.choice.fields() if self.choice else None

    @property
    def overlaps(self) -> bool:
        """True if prefill sums are faster as two halves that overlap, according to the measurement.

        The halves need twice as many messages.
        """
        return self.tune().overlap

    @property
    def stats(self) -> GroupStats:
        """Totals since the group was opened, with the bytes that the shared connections carried."""
        return self.transport.with_traffic(self._stats)

    def _begin(self, step: int) -> None:
        self.transport.begin(step)

    def close(self) -> None:
        """Close the connections that this node made."""
        self.transport.close()

    def _unmeasured(self) -> Choice:
        sizes = self.spec.payload_values
        predicted = {name: self._predictions(name) for name in self.groups}
        decode = "mesh" if self.size <= _FEW else "star"
        return Choice(decode, "two-shot", False, *sizes, predicted, {})

    def _known(self) -> dict[cache.Pair, cache.CachedLink]:
        """Return the links in the cache. Only the master has a cache; on workers the result is empty."""
        return cache.load(self._cache, cache.ends(self.spec)) if self._cache and self.rank == 0 else {}

    def _chosen_by(self, known: dict[cache.Pair, cache.CachedLink], work: Work, doubted: bool = False) -> Choice:
        """Measure links, store them in the cache, and return the algorithms chosen for them.

        Args:
            known: the links in the cache, which are not measured.
            work: what a node computes between two sums of prefill.
            doubted: True to measure the known links too, because sums took longer or shorter than they predict.
        """
        trusted = {} if doubted else {pair: one.link for pair, one in known.items()}
        self.links = measure_links(self.transport, trusted)
        if self._cache and self.rank == 0:
            cache.save(self._cache, cache.ends(self.spec), self.links.links, known, doubted)
        choice = choose(self.groups, self.links, *self.spec.payload_values, work)
        return replace(choice, links_age_s=max((one.age_s for one in known.values()), default=0.0) if trusted else 0.0)

    def _remembered(self, known: dict[cache.Pair, cache.CachedLink]) -> bool:
        """Return True if some `known` link was taken from the cache without ever having been confirmed.

        A link is confirmed if it was doubted, measured again, and found the same. The master decides, as only it has
        the cache, and sends its answer to all nodes.
        """
        doubtful = [pair for pair, one in known.items() if not one.confirmed]
        return bool(share(self.transport, np.array([len(doubtful)], np.float32))[0])

    def _predictions(self, name: str) -> tuple[float, float, float]:
        decode, prefill = self.spec.payload_values
        one, whole, half = (self._predicted(name, values) for values in (decode, prefill, prefill // IN_FLIGHT))
        return one, whole, half

    def _predicted(self, name: str, values: int) -> float:
        return predict(name, self.links, values, self.wire) if self.links else 0.0

    def _choose(self, count: int) -> Networked:
        """Return the group that sums payloads of `count` values, and remember it for the next sum."""
        group = self._chosen[count] = self.groups[self.tune().name_for(count)]
        return group

    def _allreduce(self, values: F32) -> Exchange:
        return (self._chosen.get(values.size) or self._choose(values.size))._allreduce(values)

    def _reduce(self, values: F32) -> Exchange:
        return (self._chosen.get(values.size) or self._choose(values.size))._reduce(values)
