"""Byte ranges of files, and how fast a disk reads them."""
