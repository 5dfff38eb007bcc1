"""`tpi batch`: it answers the requests of one file in another, and continues where it was interrupted."""
