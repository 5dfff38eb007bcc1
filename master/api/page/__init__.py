"""The page at `/`: static files, and the nodes' figures that it shows."""
