"""What trust costs, and how fast a cluster is whole again after a fault."""
