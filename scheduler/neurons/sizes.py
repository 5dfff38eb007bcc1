"""Classes of step sizes that are measured together, since a neuron's cost depends on the number of tokens."""


def size_class(tokens: int) -> int:
    """Return the class of a step of `tokens` tokens: 0 for 1, 1 for 2, 2 for 3 to 4, 3 for 5 to 8, and so on."""
    return (tokens - 1).bit_length()


def size_name(size: int) -> str:
    """Return a size class in words, such as "3 to 4 tokens"."""
    most = 1 << size
    least = most // 2 + 1
    if size == 0:
        return "1 token"
    return f"{most} tokens" if least == most else f"{least} to {most} tokens"
