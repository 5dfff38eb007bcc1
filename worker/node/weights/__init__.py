"""The sources of a node's weights (memory window, resident segments, accelerator rings), and their opening."""
