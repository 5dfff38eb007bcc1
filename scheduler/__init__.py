"""The scheduler of weight *memory*: where weights live and move (`master.generation.batcher` admits requests)."""
