"""Models as GGUF files describe them."""
