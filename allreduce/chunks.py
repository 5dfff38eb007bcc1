"""Division of a vector into one chunk per node, for algorithms in which each node sums a part."""

from tpi.net.wire import GROUP


def chunks(count: int, size: int) -> list[slice]:
    """Return `size` slices that cover `count` values in order. The last ones may be shorter or empty.

    Slices end at multiples of 32, so that a slice has the same encoding as within the whole vector.
    """
    step = -(-count // (size * GROUP)) * GROUP
    return [slice(min(rank * step, count), min((rank + 1) * step, count)) for rank in range(size)]
