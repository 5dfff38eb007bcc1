"""Stop texts: they end an answer, and no part of one is ever shown."""

from collections.abc import Sequence


class StopFilter:
    """Passes text on, except text that could still become a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None  # the stop text that was completed first

    def push(self, text: str) -> str:
        """Return the part of the text so far that is safe to show; set `stopped` when a stop text is complete."""
        self._held += text
        found = [(index, stop) for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            index, self.found = min(found)
            shown, self._held = self._held[:index], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    @property
    def stopped(self) -> bool:
        """True if a stop text is complete."""
        return self.found is not None

    def flush(self) -> str:
        """Return the text that was held back, once it is known that no stop text follows."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` with which `text` ends."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
