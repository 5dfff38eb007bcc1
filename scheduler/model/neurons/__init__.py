"""The choice of the neurons and predictors on the accelerator: PowerInfer's integer program (section 6)."""
