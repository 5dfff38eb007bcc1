"""What is asked and what comes of it, in the server's own words: every form is turned into these."""
