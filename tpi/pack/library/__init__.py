"""Packs and models on this machine: finding, downloading, locking while in use, and removing."""
