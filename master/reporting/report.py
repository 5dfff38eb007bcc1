"""Reports of a run: the object of `--json` and the table of nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from master.generation.answer import Answer
from tpi.config import ModelConfig
from tpi.net.questions import Stats, Steady
from tpi.partition import FFN_UNIT, Range, Shard

if TYPE_CHECKING:  # rich is loaded only when a table is drawn, after the answer
    from rich.table import Table

    from master.planning.home.compared import ComparedLayouts
    from tpi.console import SafeConsole

MILLI = 1e3
_TABLE_WIDTH = 80
MEGA = 1e6
HOUR = 3600.0


@dataclass(frozen=True)
class NodeReport:
    """One node's share and figures. Ranges are [first, last+1); times are per generated token, in milliseconds."""

    name: str
    rank: int
    layers: list[list[int]]  # one range for each of its stages
    heads: list[int]
    kv_heads: list[int]
    neurons: list[int]
    weight_bytes: int
    resident_bytes: int  # memory of the blocks' weights
    bare_rss_bytes: int  # memory of the process before it was given any work
    planned_bytes: int  # memory that it planned to take above the bare process
    peak_rss_bytes: int  # the most memory that it took in total
    compute_ms_per_token: float
    sync_ms_per_token: float
    hop_ms_per_token: float  # waiting for the hidden states of other stages
    io_stall_ms_per_token: float
    streamed_bytes_per_token: float
    disk_mb_per_s: float  # MB read, of the blocks' and the head's weights, per second with at least one read under way
    sent_bytes_per_token: float
    received_bytes_per_token: float
    # only for a node that streams weights: its waits for the disk, and settings that would avoid them
    steady: Steady | None
    accelerator: str = ""  # a description of the accelerator's work, if there is one


@dataclass(frozen=True)
class NodeShare:
    """A node's part of the plan, and the memory of its bare process."""

    name: str
    rank: int
    layers: tuple[Range, ...]  # layers of each of its stages
    shard: Shard
    query_heads: int  # query heads in one unit
    kv_heads: int  # KV heads in one unit
    bare_rss_bytes: int = 0


def node_report(config: ModelConfig, node: NodeShare, before: Stats, after: Stats) -> NodeReport:
    """Return one node's figures between two snapshots, per token of the steps between them."""
    tokens = max(after.tokens - before.tokens, 1)
    disk_seconds = after.disk_s - before.disk_s
    streamed = after.streamed_bytes - before.streamed_bytes
    shard = node.shard
    return NodeReport(
        name=node.name,
        rank=node.rank,
        layers=[each.as_list() for each in node.layers],
        heads=shard.query.scaled(node.query_heads, config.heads).as_list(),
        kv_heads=shard.kv.scaled(node.kv_heads, config.kv_heads).as_list(),
        neurons=_neurons(config, shard).as_list(),
        weight_bytes=after.weight_bytes,
        resident_bytes=after.resident_bytes,
        bare_rss_bytes=node.bare_rss_bytes,
        planned_bytes=after.planned_bytes,
        peak_rss_bytes=after.peak_rss_bytes,
        compute_ms_per_token=MILLI * (after.compute_s - before.compute_s) / tokens,
        sync_ms_per_token=MILLI * (after.sync_s - before.sync_s) / tokens,
        hop_ms_per_token=MILLI * (after.hop_s - before.hop_s) / tokens,
        io_stall_ms_per_token=MILLI * (after.stall_s - before.stall_s) / tokens,
        streamed_bytes_per_token=streamed / tokens,
        disk_mb_per_s=streamed / disk_seconds / MEGA if disk_seconds else 0.0,
        sent_bytes_per_token=(after.sent_bytes - before.sent_bytes) / tokens,
        received_bytes_per_token=(after.received_bytes - before.received_bytes) / tokens,
        steady=after.steady,
        accelerator=after.accelerator,
    )


def _neurons(config: ModelConfig, shard: Shard) -> Range:
    """Return the neurons of a dense FFN block or, if no layer has such a block, of each routed expert."""
    if config.mixture is not None and not len(shard.ffn):
        return shard.expert.scaled(FFN_UNIT, config.mixture.width)
    return shard.ffn.scaled(FFN_UNIT, config.intermediate)


def answer_fields(answer: Answer) -> dict[str, Any]:
    """Return the fields of `--json` that describe one answer."""
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.token_ids),
        "drafted_tokens": answer.drafts.made,
        "accepted_tokens": answer.drafts.right,
        "ttft_s": answer.ttft,
        "prefill_tokens_per_s": answer.prefill_rate,
        "decode_tokens_per_s": answer.decode_rate,
        "finish_reason": answer.finish_reason,
    }


def node_fields(nodes: Sequence[NodeReport]) -> list[dict[str, Any]]:
    """Return the `nodes` field of `--json`."""
    return [asdict(node) for node in nodes]


def print_nodes(nodes: Sequence[NodeReport], summary: str, stderr: bool = False, table: bool = True) -> None:
    """Print the table of nodes, if `table` is true, and below it one line of figures for the whole run.

    The table fits 80 columns: long names are wrapped.
    """
    console = wide_console(stderr)
    if table:
        staged = any(node.layers != nodes[0].layers for node in nodes)
        columns = ("layers", *_COLUMNS, "hop\nms") if staged else _COLUMNS
        rows = [(node.name, *(_staged_cells(node) if staged else _cells(node))) for node in nodes]
        console.print(figures_table("node", *columns, rows=rows))
    console.say(summary)
    for node in nodes:
        if node.steady is not None:
            console.say(f"{node.name}: {_verdict(node.steady)}")
        if node.accelerator:
            console.say(f"{node.name}: {node.accelerator}")


def print_compared(compared: "ComparedLayouts | None", stderr: bool = False) -> None:
    """Print the table of layouts that `tpi plan` prints, if several layouts were compared."""
    if compared is not None:
        from master.planning.home.table import print_layouts  # imports the planner

        print_layouts(compared, stderr)


def print_choice(choice: Mapping[str, Any]) -> None:
    """Print to stdout the times that the automatic choice of collectives compared, and the collectives it chose."""
    halves = " in halves" if choice["prefill_in_halves"] else ""
    taken = f"{choice['decode']} for tokens, {choice['prefill']}{halves} for prompts"
    seen = (
        "predicted / measured ms; those of prompts include computing"
        if choice["measured_ms"]
        else "all on this machine"
    )
    if choice["links_age_s"]:
        seen += f"; links measured {choice['links_age_s'] / HOUR:.1f} h ago"
    rows = []
    for name, predicted in choice["predicted_ms"].items():
        measured = choice["measured_ms"].get(name, [0.0] * len(predicted))
        cells = zip(predicted, measured, strict=True)
        rows.append((name, *(f"{said:.2f} / {took:.2f}" if took else f"{said:.2f}" for said, took in cells)))
    console = wide_console(stderr=False)
    console.print(figures_table("collective", "a token's sum", "a prompt's block", "in halves", rows=rows))
    # printed below the table, because a caption would wrap at the table's width
    console.say(f"automatic choice: {taken} ({seen})")


def wide_console(stderr: bool) -> "SafeConsole":
    """Return a console of at least 80 columns: a narrower terminal wraps the lines, and rich cuts nothing off."""
    from tpi.console import SafeConsole

    console = SafeConsole(stderr)
    console.width = max(console.width, _TABLE_WIDTH)
    return console


def figures_table(name: str, *figures: str, rows: Sequence[Sequence[str]]) -> "Table":
    """Return a table with the names on the left and the figures aligned to the right."""
    from rich.box import SIMPLE
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(Column(name, overflow="fold", min_width=8), box=SIMPLE, padding=0, pad_edge=False)
    for title in figures:
        table.add_column(title, justify="right", no_wrap=True)
    for cells in rows:
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _verdict(steady: Steady) -> str:
    """Return a sentence that says whether a node waits for its disk, and which flags would avoid the wait."""
    measured = f"a layer loads in {MILLI * steady.load_s:.1f} ms and is busy for {MILLI * steady.busy_s:.1f} ms"
    if steady.steady:
        return f"streams in the steady state ({measured})"
    waits = f"waits {MILLI * steady.stall_s:.1f} ms per token for its disk ({measured})"
    if not steady.window:
        memory = f"about --memory {_mib(steady.least_memory)}"
        return f"{waits}; no --window avoids that: use {memory} without --window, or more nodes"
    keep = f" --retain {steady.retain}" if steady.retain else ""
    return f"{waits}; --window {steady.window}{keep} --memory {_mib(steady.window_memory)} would avoid that"


def _mib(size: int) -> str:
    return f"{-(-size >> 20)}MiB"


_COLUMNS = (
    "heads", "neurons", "weights\nMB", "peak\nMB", "compute\nms", "sync\nms", "stall\nms", "sent\nkB", "recv\nkB",
)  # fmt: skip


def _cells(node: NodeReport) -> list[str]:
    figures = (
        node.weight_bytes / MEGA,
        node.peak_rss_bytes / MEGA,
        node.compute_ms_per_token,
        node.sync_ms_per_token,
        node.io_stall_ms_per_token,
        node.sent_bytes_per_token / MILLI,
        node.received_bytes_per_token / MILLI,
    )
    return [_span(node.heads), _span(node.neurons), *map(_short, figures)]


def _staged_cells(node: NodeReport) -> list[str]:
    layers = ", ".join(map(_span, node.layers)) or "none"
    return [layers, *_cells(node), _short(node.hop_ms_per_token)]


def _short(value: float) -> str:
    """Format a number in at most five characters (up to 99999): one decimal below 1000, no decimal above."""
    return f"{value:.1f}" if value < 999.95 else f"{value:.0f}"


def _span(span: list[int]) -> str:
    return f"{span[0]}-{span[1] - 1}" if span[1] > span[0] else "none"
