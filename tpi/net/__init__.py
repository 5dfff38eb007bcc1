"""Communication between nodes: the messages, their encoding, and the sockets that carry them."""
