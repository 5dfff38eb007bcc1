"""Chat templates: what a model brings to turn a conversation into a prompt, run within limits."""
