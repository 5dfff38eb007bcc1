"""Transfers of weights, keys and values between a node's memories during computation (PIPO, section 3.2)."""
