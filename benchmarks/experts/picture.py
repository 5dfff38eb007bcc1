"""`python -m benchmarks.experts.picture`: two layers of a token in each schedule, from traces, as docs/batching.svg.

Each schedule decodes a batch on the emulated accelerator and records its spans. This is figure 6 of MoE-Lightning.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.experts.batch_node import batch_node
from benchmarks.experts.cgopipe import FILLED, OURS, REQUESTS, SETTINGS
from tests.support.devices.schedules import SCHEDULES, as_a_whole, follow
from tpi.trace import Row

TRACKS = ("accelerator", "attention", "weight load", "kv load")
NAMES = ("accelerator", "host attends", "weights up", "keys, values up")
COLOURS = {"attention": "#3b6ea8", "experts": "#d08c3a", "host": "#6a9a58", "load": "#999999"}
LAYERS = (2, 4)  # the first that is drawn, and the first that is not
WIDTH, HEIGHT, LABEL, LINE = 960, 22, 120, 6  # pixels
TARGET = Path("docs/batching.svg")


def main() -> None:
    """Trace all schedules, and draw them one below the other on the same time scale."""
    pictures = [(name, spans_of(name)) for name in (OURS, *SCHEDULES)]
    longest = max(end for _, rows in pictures for *_, end in rows)
    block = len(TRACKS) * (HEIGHT + LINE) + 40
    body = [line for at, (name, rows) in enumerate(pictures) for line in _panel(name, rows, longest, at * block + 24)]
    box = f"0 0 {LABEL + WIDTH + 10} {len(pictures) * block}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="12">'
    TARGET.write_text("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>"]) + "\n")


def spans_of(schedule: str) -> list[Row]:
    """Return the spans of `LAYERS` in a step, in nanoseconds from the beginning of the first span."""
    decide = None if schedule == OURS else as_a_whole
    with batch_node(SETTINGS[0].device, REQUESTS, FILLED, decide, trace=True) as node:
        if schedule != OURS:
            follow(node.link, schedule)
        node.steps(2)
        rows = sorted((row for row in node.spans if row[0] in TRACKS), key=lambda row: row[2])
    begins = [row[2] for row in rows if row[0] == "accelerator" and row[1] == f"attention {LAYERS[0]}"]
    ends = [row[3] for row in rows if row[0] == "accelerator" and row[1] == f"experts {LAYERS[1] - 1}"]
    end = max(ends)
    begin = min(at for at in begins if at > end - (end - min(begins)) / 2)  # of the second step
    return [
        (kind, name, max(first, begin) - begin, min(last, end) - begin)
        for kind, name, first, last in rows
        if last > begin and first < end
    ]


def _panel(title: str, rows: Sequence[Row], longest: int, top: int) -> Iterator[str]:
    yield _text(4, top - 6, title, ' font-weight="bold"')
    for number, (track, name) in enumerate(zip(TRACKS, NAMES, strict=True)):
        y = top + number * (HEIGHT + LINE)
        yield _text(4, y + 15, name)
        yield f'<line x1="{LABEL}" x2="{LABEL + WIDTH}" y1="{y + HEIGHT}" y2="{y + HEIGHT}" stroke="#bbb"/>'
        for kind, what, first, last in rows:
            if kind == track:
                yield _bar(kind, what, first * WIDTH / longest, last * WIDTH / longest, y)


def _bar(kind: str, what: str, first: float, last: float, y: float) -> str:
    own = {"attention": "host", "weight load": "load", "kv load": "load"}
    colour = COLOURS[own.get(kind) or what.split()[0]]
    box = f'x="{LABEL + first:.1f}" y="{y}" width="{max(last - first, 0.5):.1f}" height="{HEIGHT}"'
    return f'<rect {box} fill="{colour}" stroke="white" stroke-width="0.5"><title>{escape(what)}</title></rect>'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{more}>{escape(text)}</text>'


if __name__ == "__main__":
    main()
