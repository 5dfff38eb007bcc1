"""Moving weights, keys and values between a node's memories while it computes (PIPO, section 3.2)."""
