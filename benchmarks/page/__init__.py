"""docs/benchmarks.md and its plots."""
