"""`tpi serve`: an HTTP server for the API forms of OpenAI and Anthropic.

Each form is a thin adapter to one core, `master.api.answers`.
"""
