"""Between nodes: messages, how they are coded, and the sockets they travel through."""
