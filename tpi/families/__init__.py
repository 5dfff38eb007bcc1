"""Model families. Each maps a config.json or GGUF metadata to a `ModelConfig` and to tensor names."""
