"""Speculation: a step also runs drafted tokens, and the request's own sampler decides which ones were right."""
