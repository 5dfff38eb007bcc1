"""The workers of a run as the master sees them: connections, heartbeats, weights, and links between them."""
