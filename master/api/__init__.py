"""`tpi serve`: an HTTP server for the API forms of OpenAI and Anthropic.

One core (`answers`), with a thin adapter each.
"""
