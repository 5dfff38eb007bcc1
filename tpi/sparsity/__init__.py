"""Sparsity: predictors of active neurons, and thresholds for models whose activations are never 0."""
