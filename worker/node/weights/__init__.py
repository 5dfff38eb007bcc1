"""Where the weights of a node come from, and how they are opened."""
