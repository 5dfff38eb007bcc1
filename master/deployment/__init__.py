"""Plans that assign weights to nodes, and deployments made from plans."""
