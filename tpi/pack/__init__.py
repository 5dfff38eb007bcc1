"""Weight packs: models on disk as content-addressed blocks of equal units, built in one pass over the source."""
