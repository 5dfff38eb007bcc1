"""What benchmarks share: commits, the machine, commands, models, engines, several one after the other."""
