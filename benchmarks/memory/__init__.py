"""Models larger than memory, and the memory of nodes."""
