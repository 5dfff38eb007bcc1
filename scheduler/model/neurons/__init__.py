"""Which neurons and predictors stay on the accelerator: PowerInfer's integer program (section 6)."""
