"""The ways to sum: who sends what to whom."""
