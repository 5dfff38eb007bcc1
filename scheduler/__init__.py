"""The weight *memory* scheduler: where each weight lives and when it moves (request admission is `master.batcher`)."""
