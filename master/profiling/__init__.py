"""`tpi profile`: how a model's neurons are used over a text, kept beside its pack."""
