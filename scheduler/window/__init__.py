"""The memory window: threads that read blocks ahead of their use, holds on blocks, and counters."""
