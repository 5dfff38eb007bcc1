"""Text in and out: where prompts come from, the tokenizer, chat templates."""
