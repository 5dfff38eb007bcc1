"""What streaming will cost, by calculation: ring, placement, timeline, the steady state."""
