"""Reading of models from the config.json of a Hugging Face directory."""
