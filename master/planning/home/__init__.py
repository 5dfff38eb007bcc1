"""A home that is planned for: its machines and links, who is to hold what of a model, and how fast that will be."""
