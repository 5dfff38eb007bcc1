"""Chunks of experts that are streamed through an accelerator: how blocks are cut, and the table of their places."""
