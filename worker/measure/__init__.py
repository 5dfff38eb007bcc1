"""The measurement of this machine's speed, done once and then remembered."""
