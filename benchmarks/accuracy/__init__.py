"""Whether the tokens are right, and what formats cost in quality."""
