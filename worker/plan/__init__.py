"""What a node is to hold: the plan it was sent, what of it stays in memory, and whether it fits."""
