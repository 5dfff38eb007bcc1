"""Families with gated DeltaNet layers: Qwen3-Next and Qwen3.5."""
