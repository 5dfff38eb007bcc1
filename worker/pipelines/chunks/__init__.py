"""Chunks of experts on their way through an accelerator: how they are cut, and the table of where they lie."""
