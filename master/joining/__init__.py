"""Workers that join and leave: discovery, measuring, shares, and recovery from a lost worker."""
