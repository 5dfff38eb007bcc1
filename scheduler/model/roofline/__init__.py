"""The hierarchical roofline model of MoE-Lightning: levels of memory, the time of a layer, the best policy."""
