"""What a demand cache counts."""

from dataclasses import dataclass, fields


@dataclass
class DemandStats:
    """Totals since the cache was opened. Units, bytes, seconds."""

    steps: int = 0
    hits: int = 0  # uses that found their unit there
    misses: int = 0  # uses for which a unit was loaded, or waited for while it was
    elsewhere: int = 0  # uses that did without: another device has the unit, too, and was sooner
    read_bytes: int = 0  # of units on demand and ahead, as they are read
    ahead: int = 0  # units that were loaded ahead
    ahead_used: int = 0  # of those, used while they were there
    ahead_wasted: int = 0  # of those, gone before they were used
    stall_seconds: float = 0.0  # that holds waited

    @property
    def uses(self) -> int:
        """All that was wanted."""
        return self.hits + self.misses + self.elsewhere

    @property
    def hit_rate(self) -> float:
        """Share of the uses that waited for nothing; 0 to 1."""
        return self.hits / max(1, self.uses)

    @property
    def bytes_per_step(self) -> float:
        """What a step read."""
        return self.read_bytes / max(1, self.steps)

    def copy(self) -> "DemandStats":
        """As they are now."""
        return DemandStats(**{field.name: getattr(self, field.name) for field in fields(self)})
