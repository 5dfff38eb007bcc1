"""Display of answers at a terminal: plain, or with Markdown styled as it comes."""
