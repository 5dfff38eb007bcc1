"""The memory window at work: threads that read ahead, blocks that are held, and what is counted."""
