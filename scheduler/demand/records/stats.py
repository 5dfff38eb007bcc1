"""What a tier of records counts."""

from dataclasses import dataclass, replace


@dataclass
class RecordStats:
    """Totals since it was opened. Records, bytes, seconds; filling the slots at first is not counted."""

    tokens: int = 0  # steps that read by neurons
    asked: int = 0  # records that were wanted
    found: int = 0  # of those, in memory then
    reads: int = 0
    read_bytes: int = 0  # whole pages, as they are read
    along: int = 0  # records that were read in between and kept
    dense_bytes: int = 0  # that the same blocks would have read, whole
    stall_seconds: float = 0.0  # that holds waited

    def copy(self) -> "RecordStats":
        """As they are now."""
        return replace(self)

    @property
    def hit_rate(self) -> float:
        """Share of the records that were in memory when they were wanted; 0 to 1."""
        return self.found / max(1, self.asked)

    @property
    def mean_read(self) -> float:
        """Bytes of a read."""
        return self.read_bytes / max(1, self.reads)

    def describe(self) -> str:
        """In a sentence; empty before anything was asked for."""
        if not self.asked:
            return ""
        steps = max(1, self.tokens)
        return (
            f"neurons come from disk as they are wanted: {self.asked / steps:.0f} records a step, {self.hit_rate:.0%} "
            f"found in memory, {self.read_bytes / steps / 1e6:.2f} MB read where all neurons are "
            f"{self.dense_bytes / steps / 1e6:.2f} MB, {self.mean_read / 1024:.0f} KiB a read"
        )
