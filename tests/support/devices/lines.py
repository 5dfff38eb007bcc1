"""Costs that tests compute with."""

from scheduler.neurons.costs import LineCost

FAST, SLOW = LineCost(1.0, 0.1), LineCost(0.5, 1.0)
