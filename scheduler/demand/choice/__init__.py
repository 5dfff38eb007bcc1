"""Which policy a demand cache is run by: replays of what was recorded, the cliff of LRU, and the choice."""
