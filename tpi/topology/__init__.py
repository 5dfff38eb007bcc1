"""What a home is made of, the files that say so, and what its links carry."""
