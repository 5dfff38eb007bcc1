"""Tool calls in the text of a model: one parser and one grammar for each family of chat templates."""
