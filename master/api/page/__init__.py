"""The page at `/`: files that the server hands out as they are, and the figures of the house that it shows."""
