"""Families with multi-head latent attention: keys and values are computed from a latent vector."""
