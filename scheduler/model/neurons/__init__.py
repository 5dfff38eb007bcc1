"""Which neurons stay on the accelerator: PowerInfer's integer program (section 6), and the tables that follow."""
