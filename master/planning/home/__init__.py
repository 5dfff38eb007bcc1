"""Planning for a home: its machines and links, each machine's part of a model, and how fast that will be."""
