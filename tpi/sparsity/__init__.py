"""Sparsity: profiles and predictors of active neurons."""
