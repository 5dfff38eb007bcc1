"""Weight memory as slots: one cache for blocks, segments, experts and neurons, filled from the tier below."""
