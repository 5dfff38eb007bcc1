"""What a home is made of, and the files that say so."""
