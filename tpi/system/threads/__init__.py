"""Threads that wait or look around, and how they end."""
