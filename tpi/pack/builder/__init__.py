"""From a model's files to a pack."""
