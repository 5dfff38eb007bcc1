"""Tool calls in a model's text: parsers for each family of chat templates, and the data for their grammars."""
