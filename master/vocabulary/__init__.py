"""The embedding and the head, which never leave the master."""
