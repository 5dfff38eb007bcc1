"""The model of a home network: its devices and links, the files that describe them, and the links' speeds."""
