"""A node that computes on two devices: its work, its time, its memory, and the best way to place the work."""
