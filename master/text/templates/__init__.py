"""Chat templates: the program of a model that turns a conversation into a prompt, run within limits."""
