"""The counters of a demand cache."""

from dataclasses import dataclass

from scheduler.slots.stats import LoadStats


@dataclass
class DemandStats(LoadStats):
    """Counts of steps, uses of units, and units that were loaded ahead, since the cache was opened."""

    steps: int = 0
    elsewhere: int = 0  # uses that were computed on another device, which was faster than loading
    ahead: int = 0  # units that were loaded ahead
    ahead_used: int = 0  # number of these that were used before they were evicted
    ahead_wasted: int = 0  # number of these that were evicted before they were used

    @property
    def uses(self) -> int:
        """Number of uses of units, whether they were in the cache or not."""
        return self.hits + self.misses + self.elsewhere

    @property
    def hit_rate(self) -> float:
        """Share of the uses that found their unit loaded, 0 to 1."""
        return self.hits / max(1, self.uses)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that were loaded, per step."""
        return self.read_bytes / max(1, self.steps)
