"""How much of a model each node of a home is to hold: the fewest seconds for a token, within everybody's memory."""
