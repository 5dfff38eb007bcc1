"""The profile of a model whose neurons are chosen by their gate: how many are left out at which error."""

from typing import Any

from tpi.sparsity.gates import GateCurves
from tpi.sparsity.thresholds import DEFAULT_ERROR

_ERRORS = (0.02, DEFAULT_ERROR, 0.08, 0.16)


def gate_figures(curves: GateCurves) -> dict[str, Any]:
    """Return the figures: `skipped`, by error, is the share of neurons of all layers that is left out, from 0 to 1."""
    return {"skipped": {str(error): curves.at(error).skipped for error in _ERRORS}}


def gate_lines(found: dict[str, Any]) -> list[str]:
    """Return the sentences for the user."""
    return [
        f"--sparsity-error {error}: {share:.1%} of the neurons are left out after their gate"
        for error, share in found["skipped"].items()
    ]
