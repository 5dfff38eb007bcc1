"""The hierarchical roofline model, and the policies that it chooses."""
