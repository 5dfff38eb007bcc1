"""Which neurons a token needs: predictors kept beside a pack, and thresholds for models whose activations are not 0."""
