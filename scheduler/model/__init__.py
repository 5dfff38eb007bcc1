"""The calculated cost of streaming (ring, placement, timeline, steady state), and plans for nodes and groups."""
