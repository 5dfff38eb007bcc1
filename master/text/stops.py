"""Stop texts, which end an answer. No part of a stop text is shown."""

from collections.abc import Sequence


class StopFilter:
    """Filter that passes text on, except text that could still become a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None  # the stop text that was completed first

    def push(self, text: str) -> str:
        """Take more text; return the text that is safe to show. Set `found` when a stop text is complete."""
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
        """Return the text held back. Call this at the end of the answer, when no stop text can follow."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest beginning of `stop` with which `text` ends, the whole of `stop` excluded."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
