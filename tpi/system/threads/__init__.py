"""Helper threads: interruptible reading, and periodic work that survives errors."""
