"""Getting models: downloads for the machines of the house, and a list of recommended models."""
