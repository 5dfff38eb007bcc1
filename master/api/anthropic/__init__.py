"""Anthropic's API form: messages, and counting their tokens."""
