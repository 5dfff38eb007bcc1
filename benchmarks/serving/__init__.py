"""Many at once: `tpi serve` under load."""
