"""Profiles of a model's active neurons, and the predictors that are trained from them."""
