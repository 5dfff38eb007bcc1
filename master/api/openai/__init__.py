"""OpenAI's forms: chat completions, completions, responses, embeddings, models."""
