"""The experts that a model's tokens choose over a text, piece by piece: progress is stored after each piece."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from master.profiling.measure import PIECE
from scheduler.demand.choice.select import SelectedPolicy, recording_of_experts, select
from tpi.kernels import Kernels
from tpi.kernels.spec import Routing
from tpi.pack.manifest import MANIFEST
from tpi.pack.reader import Pack
from tpi.pack.routing import NAME, U16, RoutingRecord, load_routing, save_routing
from tpi.progress import Progress
from tpi.sparsity.replay import I32, replay

_SHARES = (0.125, 0.25, 0.5)  # sizes of the caches whose hit rates are reported, as shares of all experts


def record_routing(pack: Pack, tokens: I32, kernels: Kernels, progress: Progress) -> RoutingRecord:
    """Return the record of the experts that `tokens` `[sequences, length]` choose. Store the record after every piece.

    Raises:
        ModelError: if the stored record is damaged.
        WeightsError: if the record cannot be stored.
    """
    path = pack.path / NAME
    record = _begun(pack, tokens, path)
    done = record.tokens // tokens.shape[1]
    progress(done, len(tokens))
    while done < len(tokens):
        piece = tokens[done : done + PIECE]
        record = record.extended(_chosen(pack, piece, kernels))
        done += len(piece)
        save_routing(path, record)
        progress(done, len(tokens))
    return record


def routing_figures(record: RoutingRecord) -> dict[str, Any]:
    """Return figures of the recorded choice of experts as JSON fields; shares and rates are from 0 to 1.

    They are the share of tokens that choose each layer's most used expert, and the hit rates of caches that hold some
    share of all experts.
    """
    layers, count = record.experts.shape[1], int(record.experts.max()) + 1
    counts = [np.bincount(record.experts[:, at].ravel(), minlength=count) for at in range(layers)]
    keys = [(layer, expert) for layer in range(layers) for expert in range(count)]
    recording = recording_of_experts(record.sample(), range(layers), keys)
    least = max(recording.largest_use, 1)
    held = {share: select(recording, max(least, int(share * len(keys)))) for share in _SHARES}
    return {
        "tokens": record.tokens,
        "layers": [{"most_used": float(each.max() / max(1, each.sum()) * record.experts.shape[2])} for each in counts],
        "held": [{"experts": share, **_selected(one)} for share, one in held.items()],
    }


def _selected(one: SelectedPolicy) -> dict[str, Any]:
    return {"policy": one.choice.name, "found": one.hit_rate, "lru": one.lru, "belady": one.best}


def routing_table(found: dict[str, Any]) -> str:
    """Return the routing figures as a table, for the user."""
    lines = ["layer  tokens that choose the expert that is chosen most"]
    lines += [f"{at:5}  {one['most_used']:6.1%}" for at, one in enumerate(found["layers"])]
    lines += [
        f"a cache of {one['experts']:.1%} of the experts has a hit rate of {one['found']:.1%} "
        f"(LRU {one['lru']:.1%}, at best {one['belady']:.1%}): {one['policy']}"
        for one in found["held"]
        if one["found"] is not None
    ]
    return "\n".join([*lines, f"{found['tokens']} tokens, stored in {found['routing']}"])


def _begun(pack: Pack, tokens: I32, path: Path) -> RoutingRecord:
    manifest = (pack.path / MANIFEST).read_bytes()
    of = hashlib.sha256(manifest + np.array(tokens.shape, "<i4").tobytes() + tokens.astype("<i4").tobytes()).hexdigest()
    if path.exists() and (kept := load_routing(path)).of == of:
        return kept
    return RoutingRecord(of, 0, np.zeros((0, 0, 0), np.uint16))


def _chosen(pack: Pack, piece: I32, kernels: Kernels) -> U16:
    found: list[U16] = []

    def note(layer: int, routing: Routing) -> None:
        found.append(routing.experts.astype(np.uint16))

    replay(pack, piece, kernels, chosen=note)
    return np.stack(found, axis=1)
