"""Authentication between machines: this machine's key, the keys that it trusts, and the pairing of two machines."""
