"""Text in and out: the sources of prompts, the tokenizer, and chat templates."""
