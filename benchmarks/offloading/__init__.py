"""Offloading to an accelerator: schedules on the emulated one, and the PIPO paper's tables."""
