"""Readers of model files: safetensors directories and GGUF files, checked before they are trusted."""
