"""The packs of this machine: found, fetched, held while they are used, and removed."""
