"""Is it as specified? What this machine offers, and what is measured from inside."""
