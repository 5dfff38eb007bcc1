"""Anthropic's form: messages, and counting their tokens."""
