"""The command `tpi profile`: how a model's neurons are used over a text, stored next to its pack."""
