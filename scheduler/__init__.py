"""The scheduler of weight *memory*: where weights are stored and when they move.

Requests are scheduled elsewhere, by `master.generation.batcher`.
"""
