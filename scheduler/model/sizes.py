"""Sizes that both the budget and the cost model use."""

LONGEST_CHUNK = 512  # tokens of a prefill step, if memory and context allow it
STAGE_CHUNK = 32  # least tokens of a prefill step if there are several stages, unless a node can compute only fewer
TILE = 4 << 20  # bytes of a table's tile; two are in memory at once, one in use and one being read
