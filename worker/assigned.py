"""What an Assign says of one node: its units of each layer, the blocks in order of use, their layouts."""

from tpi.messages import Assign
from tpi.pack.layout import RunLayout
from tpi.partition import Range, Shard


def used_blocks(assign: Assign) -> list[int]:
    """Indices into `assign.blocks` in the order in which the block loop uses them: attention, FFN, attention, ..."""
    return [index for layer in assign.layers for index in (layer.attention, layer.ffn)]


def local_shard(assign: Assign, layer: int) -> Shard:
    """The units of `layer` that this node holds."""
    plan_ = assign.layers[layer]
    ranges = {
        assign.layouts[run.layout].name: Range(run.first, run.last)
        for index in (plan_.attention, plan_.ffn)
        for run in assign.blocks[index].runs
    }
    return Shard(ranges["query"], ranges["kv"], ranges["neuron"])


def layouts(assign: Assign, block: int) -> dict[str, RunLayout]:
    """The layouts of one block's runs, by name."""
    found = (assign.layouts[run.layout] for run in assign.blocks[block].runs)
    return {layout.name: layout for layout in found}


def block_bytes(assign: Assign, block: int) -> int:
    """Bytes of this node's units of one block."""
    return sum((run.last - run.first) * assign.layouts[run.layout].unit_bytes for run in assign.blocks[block].runs)
