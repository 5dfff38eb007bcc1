"""What the operating system gives and does: files, clocks, signals, cores."""
