"""Weight packs: models on disk as blocks of equal units, content-addressed, made by streaming."""
