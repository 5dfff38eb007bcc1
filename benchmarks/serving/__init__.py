"""Speed and memory of `tpi serve` with many clients at once."""
