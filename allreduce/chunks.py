"""How a vector is cut into one chunk per node, for the algorithms in which each node sums a part."""

from tpi.net.wire import GROUP


def chunks(count: int, size: int) -> list[slice]:
    """`size` slices that cover `count` values in order, cut at multiples of 32 so that they encode as the whole does.

    The last ones are shorter or empty.
    """
    step = -(-count // (size * GROUP)) * GROUP
    return [slice(min(rank * step, count), min((rank + 1) * step, count)) for rank in range(size)]
