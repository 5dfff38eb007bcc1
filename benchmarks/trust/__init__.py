"""The cost of encryption and keys, and the time until a cluster is whole again after a fault."""
