"""Plans with one changed value, for tests of the checks of a worker."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tpi.net.messages import NodeOptions, PeerAddress

Where = tuple[str | int, ...]
OPTIONS = NodeOptions(context=64, pages=4, kv_dtype="f32", prefill_tokens=16, scheduler="window")
PEERS = (
    PeerAddress(0, "master", ""),
    PeerAddress(1, "a", "tcp://127.0.0.1:9"),
    PeerAddress(2, "b", "tcp://127.0.0.1:9"),
)


def changed(value: Any, path: Where, new: Any) -> Any:
    """Return `value` with the item at `path` replaced by `new`."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(key, int):
        return (*value[:key], changed(value[key], rest, new), *value[key + 1 :])
    return replace(value, **{key: changed(getattr(value, key), rest, new)})


def leaves(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield the paths of all values in the header of a message, except arrays."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path


def put(value: Any, path: tuple[int, ...], new: Any) -> Any:
    return [*value[: path[0]], put(value[path[0]], path[1:], new), *value[path[0] + 1 :]] if path else new
