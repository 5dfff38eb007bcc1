"""Workers that come and go while the master runs: what happens then, who is in the house, and what is in the way."""
