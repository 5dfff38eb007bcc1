"""Roofline charts as SVG: figures 4 and 5 of MoE-Lightning for any machine. Both axes are logarithmic."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 760, 380, 90, 40, 56, 190  # pixels
_COLOURS = ("#3b6ea8", "#6a9a58", "#d08c3a", "#a85b8c", "#777777")


@dataclass(frozen=True)
class Slope:
    """A memory roof of a chart: `rate` bytes per second times the intensity.

    It ends at the compute roof `top`, in operations per second.
    """

    label: str
    rate: float
    top: float


@dataclass(frozen=True)
class Mark:
    """A labelled point of a chart, at an intensity in operations per byte and a speed in operations per second."""

    label: str
    intensity: float
    performance: float


@dataclass(frozen=True)
class RooflineChart:
    """One chart. `levels` are horizontal lines at operations per second, `lines` vertical ones at intensities."""

    title: str
    slopes: Sequence[Slope]
    levels: Sequence[tuple[str, float]]
    lines: Sequence[tuple[str, float]]
    marks: Sequence[Mark]

    def span(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the powers of ten at which each axis begins and ends."""
        xs = [x for _, x in self.lines] + [mark.intensity for mark in self.marks if mark.intensity > 0]
        xs += [slope.top / slope.rate for slope in self.slopes]
        across = floor(log10(min(xs)) - 0.3), ceil(log10(max(xs)) + 0.3)
        highest = max(level for _, level in self.levels)
        lowest = min(slope.rate for slope in self.slopes) * 10.0 ** across[0]
        return across, (floor(log10(lowest)), ceil(log10(highest) + 0.1))


def draw_charts(charts: Sequence[RooflineChart]) -> str:
    """Return all charts, one below the other, as the text of an SVG file."""
    height = len(charts) * (_HEIGHT + 20)
    width = _LEFT + _WIDTH + _RIGHT
    body = [line for number, chart in enumerate(charts) for line in _chart(chart, number * (_HEIGHT + 20))]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
    return head + 'font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"


class _Axes:
    def __init__(self, chart: RooflineChart, top: int) -> None:
        self.across, self.up = chart.span()
        self.left, self.right = _LEFT, _LEFT + _WIDTH
        self.top, self.bottom = top + _TOP, top + _HEIGHT - _BOTTOM

    def x(self, intensity: float) -> float:
        first, last = self.across
        at = (log10(intensity) - first) / (last - first)
        return round(self.left + min(max(at, 0.0), 1.0) * (self.right - self.left), 1)

    def y(self, performance: float) -> float:
        first, last = self.up
        at = (log10(performance) - first) / (last - first)
        return round(self.bottom - min(max(at, 0.0), 1.0) * (self.bottom - self.top), 1)


def _chart(chart: RooflineChart, top: int) -> Iterator[str]:
    axes = _Axes(chart, top)
    yield _text(axes.left, top + 22, chart.title, ' font-weight="bold"')
    yield from _grid(axes)
    for at, (label, level) in enumerate(chart.levels):
        yield _line(
            (axes.left, axes.y(level)), (axes.right, axes.y(level)), _COLOURS[at % len(_COLOURS)], ' stroke-width="2"'
        )
        yield _text(axes.right + 6, axes.y(level) + 4, label)
    for at, slope in enumerate(chart.slopes):
        yield from _slope(axes, slope, _COLOURS[at % len(_COLOURS)])
    for at, (label, intensity) in enumerate(chart.lines):
        across = axes.x(intensity)
        yield _line((across, axes.top), (across, axes.bottom), "#444", ' stroke-dasharray="2 3"')
        yield _text(across + 3, axes.bottom - 6 - 14 * (at % 3), label)
    for mark in chart.marks:
        x, y = axes.x(mark.intensity), axes.y(mark.performance)
        yield f'<circle cx="{x}" cy="{y}" r="5" fill="#c0392b"><title>{escape(mark.label)}</title></circle>'
        yield _text(x + 8, y - 6, mark.label, ' fill="#c0392b" font-weight="bold"')


def _slope(axes: _Axes, slope: Slope, colour: str) -> Iterator[str]:
    begin = max(10.0 ** axes.across[0], 10.0 ** axes.up[0] / slope.rate)
    end = min(slope.top / slope.rate, 10.0 ** axes.across[1])
    there = axes.x(end), axes.y(slope.rate * end)
    yield _line((axes.x(begin), axes.y(slope.rate * begin)), there, colour, ' stroke-width="2"')
    yield _text(there[0] - 4, there[1] - 8, slope.label, f' text-anchor="end" fill="{colour}"')


def _grid(axes: _Axes) -> Iterator[str]:
    for power in range(axes.across[0], axes.across[1] + 1):
        x = axes.x(10.0**power)
        yield _line((x, axes.top), (x, axes.bottom), "#e4e4e4")
        yield _text(x, axes.bottom + 16, f"{10.0**power:g}", ' text-anchor="middle"')
    for power in range(axes.up[0], axes.up[1] + 1):
        y = axes.y(10.0**power)
        yield _line((axes.left, y), (axes.right, y), "#e4e4e4")
        yield _text(axes.left - 6, y + 4, f"{10.0 ** (power - 9):g}", ' text-anchor="end"')
    yield _text((axes.left + axes.right) / 2, axes.bottom + 36, "operations per byte", ' text-anchor="middle"')
    yield _text(6, axes.top - 6, "GFLOP/s")


def _line(begin: tuple[float, float], end: tuple[float, float], colour: str, more: str = "") -> str:
    return f'<line x1="{begin[0]}" y1="{begin[1]}" x2="{end[0]}" y2="{end[1]}" stroke="{colour}"{more}/>'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{more}>{escape(text)}</text>'
