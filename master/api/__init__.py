"""`tpi serve`: an HTTP server for the API forms of OpenAI and Anthropic.

Each form translates HTTP bodies to and from the types of the core, `master.api.answers`.
"""
