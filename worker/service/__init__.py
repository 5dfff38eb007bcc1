"""The process of a worker: its sockets, its compute thread, and the masters that it serves."""
