"""How an answer is shown at a terminal: plain, or its Markdown as it comes."""
