"""Byte ranges of files, the disks that read them, and their speeds."""
