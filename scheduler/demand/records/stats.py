"""The counters of a record tier."""

from dataclasses import dataclass

from scheduler.slots.stats import LoadStats


@dataclass
class RecordStats(LoadStats):
    """Totals since the tier was opened, without the first filling of its slots."""

    tokens: int = 0  # steps that read single neurons
    reads: int = 0
    extra: int = 0  # records that were read because they lie between requested ones, and were kept
    dense_bytes: int = 0  # bytes that reading the same blocks as a whole would have taken

    @property
    def requested(self) -> int:
        """Number of records that were requested."""
        return self.hits + self.misses

    @property
    def found(self) -> int:
        """Number of the requested records that were in memory."""
        return self.hits

    @property
    def hit_rate(self) -> float:
        """Share of the requested records that were in memory, 0 to 1."""
        return self.found / max(1, self.requested)

    @property
    def mean_read(self) -> float:
        """Mean number of bytes of a read."""
        return self.read_bytes / max(1, self.reads)

    def describe(self) -> str:
        """Return the counts as a sentence; empty if nothing was requested."""
        if not self.requested:
            return ""
        steps = max(1, self.tokens)
        return (
            f"neurons are read from disk when they are needed: {self.requested / steps:.0f} records per step, "
            f"{self.hit_rate:.0%} found in memory, {self.read_bytes / steps / 1e6:.2f} MB read (all neurons: "
            f"{self.dense_bytes / steps / 1e6:.2f} MB), {self.mean_read / 1024:.0f} KiB per read"
        )
