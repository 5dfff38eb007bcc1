"""Model families as short mappings: from a config.json or GGUF metadata to a `ModelConfig` and tensor names."""
