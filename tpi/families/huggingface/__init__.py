"""Models as config.json describes them."""
