"""A worker's process: its sockets, its thread that computes, and whom it serves."""
