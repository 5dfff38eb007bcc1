"""PowerInfer's figure 5 as SVG: the share of all activations that the most active neurons have."""

from collections.abc import Sequence

import numpy as np

from tpi.sparsity.usage import F64, NeuronProfile, cumulative

_WIDTH, _HEIGHT, _EDGE = 480, 320, 48
_POINTS = 200  # points of a curve
_HUES = (210, 20)  # hues from the first layer to the last


def figure(use: NeuronProfile) -> str:
    """Return an SVG with one thin curve for each layer, and a thick one for the whole model."""
    hues = np.linspace(*_HUES, use.layers)
    curves = [
        _curve(cumulative(counts), f"hsl({hue:.0f} 70% 50%)", 1, f"layer {at}")
        for at, (counts, hue) in enumerate(zip(use.counts, hues, strict=True))
    ]
    curves.append(_curve(cumulative(use.counts), "black", 3, "whole model"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
            ' font-size="11" text-anchor="middle">',
            '<rect width="100%" height="100%" fill="white"/>',
            *_axes(),
            *curves,
            "</svg>\n",
        ]
    )


def _curve(shares: F64, colour: str, width: int, title: str) -> str:
    neurons = np.linspace(0, 1, _POINTS)
    heights = np.interp(neurons, np.arange(len(shares) + 1) / len(shares), [0.0, *shares])
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(_place, neurons, heights))
    return (
        f'<polyline fill="none" stroke="{colour}" stroke-width="{width}" points="{points}">'
        f"<title>{title}</title></polyline>"
    )


def _axes() -> Sequence[str]:
    found = []
    for share in np.linspace(0, 1, 6):
        x, low = _place(share, 0)
        left, y = _place(0, share)
        right, high = _place(1, 1)
        found.append(f'<path d="M{x:.1f},{low:.1f}V{high:.1f}M{left:.1f},{y:.1f}H{right:.1f}" stroke="#ddd"/>')
        found.append(f'<text x="{x:.1f}" y="{low + 16:.1f}">{share:.1f}</text>')
        found.append(f'<text x="{left - 16:.1f}" y="{y + 4:.1f}">{share:.1f}</text>')
    found.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}">share of the neurons, the most active first</text>')
    found.append(f'<text transform="translate(14 {_HEIGHT / 2}) rotate(-90)">share of all activations</text>')
    return found


def _place(x: float, y: float) -> tuple[float, float]:
    return _EDGE + x * (_WIDTH - 1.5 * _EDGE), _HEIGHT - _EDGE - y * (_HEIGHT - 1.5 * _EDGE)
