"""Sizes of steps that are measured together: what a neuron costs depends on how many tokens meet it."""


def size_class(tokens: int) -> int:
    """The class of steps of so many tokens: 1, 2, 3 to 4, 5 to 8, 9 to 16, and so on are 0, 1, 2, 3, 4, ..."""
    return (tokens - 1).bit_length()


def size_name(size: int) -> str:
    """A class of sizes in words."""
    most = 1 << size
    least = most // 2 + 1
    if size == 0:
        return "1 token"
    return f"{most} tokens" if least == most else f"{least} to {most} tokens"
