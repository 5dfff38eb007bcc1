"""Where weights come from: safetensors directories and GGUF files, checked before they are trusted."""
