"""Families whose keys and values come from a latent vector (multi-head latent attention)."""
