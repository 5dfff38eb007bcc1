"""OpenAI's API forms: chat completions, completions, responses, embeddings, models."""
