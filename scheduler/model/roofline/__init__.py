"""MoE-Lightning's hierarchical roofline model: levels of memory, the time of a layer, and the best policy."""
