"""Models larger than memory, and what nodes take."""
