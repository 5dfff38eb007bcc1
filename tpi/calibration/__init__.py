"""The importance of weights: a model runs once over a short text before its float weights are quantised."""
