"""The control plane as the master sees it: the workers of one run, their heartbeats, and those of this machine."""
