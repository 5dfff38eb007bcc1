"""`python -m benchmarks.offloading.picture`: one token in both pipelines, from traces, as docs/pipelines.svg.

Each pipeline runs a small model on the emulated accelerator and records its spans. The token after the first one is
drawn.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.offloading.emulated import emulated_node
from benchmarks.support.models import smollm2
from tpi.devices.options import OffloadOptions, Pipelining
from tpi.trace import Row

DEVICE = "emu:128MiB,link=6GB/s,memory=6GB/s,flops=20TFLOP/s"
TRACKS = ("accelerator", "weight load", "kv load", "kv save")
COLOURS = ("#3b6ea8", "#d08c3a", "#6a9a58", "#a85b8c")
BLOCKS = 8  # that are drawn: the first of the token
WIDTH, HEIGHT, LABEL, LINE = 960, 26, 110, 8  # pixels
TARGET = Path("docs/pipelines.svg")


def main() -> None:
    """Trace both pipelines, and draw them one below the other."""
    pictures = [(name, spans_of_a_token(name)) for name in ("performance", "memory")]
    longest = max(end for _, rows in pictures for _, _, _, end in rows)
    height = sum(len(TRACKS) * (HEIGHT + LINE) + 40 for _ in pictures) + 20
    body, top = [], 24
    for name, rows in pictures:
        body.append(_text(4, top - 6, f"{name} pipeline", weight="bold"))
        body += _tracks(rows, longest, top)
        top += len(TRACKS) * (HEIGHT + LINE) + 40
    TARGET.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LABEL + WIDTH + 10} {height}" '
        f'font-family="sans-serif" font-size="12">\n' + "\n".join(body) + "\n</svg>\n"
    )


def spans_of_a_token(pipeline: Pipelining) -> list[Row]:
    """Return the spans of the first blocks of a token, in nanoseconds from the token's beginning."""
    options = OffloadOptions("ram", "ram", pipeline, 1)
    with emulated_node(str(smollm2().path), DEVICE, options, trace=True) as node:
        node.prompt(96)
        node.tokens(2)
        rows = sorted((row for row in node.session.node.trace.rows if row[0] in TRACKS), key=lambda row: row[2])
    begin, end = _last_token([row for row in rows if row[0] == "accelerator"])
    return [
        (kind, name, max(started, begin) - begin, min(ended, end) - begin)
        for kind, name, started, ended in rows
        if ended > begin and started < end
    ]


def _last_token(computed: Sequence[Row]) -> tuple[int, int]:
    """Return when the last token's first block begins, and when the last block that is drawn ends."""
    first = computed[0][1]
    starts = [at for at, (before, row) in enumerate(pairwise(computed), 1) if row[1] == first and before[1] != first]
    at = starts[-1]
    return computed[at][2], computed[min(at + BLOCKS, len(computed)) - 1][3]


def _tracks(rows: Sequence[Row], longest: int, top: int) -> list[str]:
    found = []
    for number, (track, colour) in enumerate(zip(TRACKS, COLOURS, strict=True)):
        y = top + number * (HEIGHT + LINE)
        found.append(_text(4, y + 17, track))
        found.append(f'<line x1="{LABEL}" x2="{LABEL + WIDTH}" y1="{y + HEIGHT}" y2="{y + HEIGHT}" stroke="#bbb"/>')
        for kind, name, begin, end in rows:
            if kind == track:
                x, width = LABEL + WIDTH * begin / longest, max(1.0, WIDTH * (end - begin) / longest)
                found.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" fill="{colour}" stroke="white">'
                    f"<title>{escape(name)}</title></rect>"
                )
    return found


def _text(x: int, y: int, text: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}" fill="#555">{escape(text)}</text>'


if __name__ == "__main__":
    main()
