"""Descriptions of runs, norms and latent vectors as the C++ module takes them."""

from __future__ import annotations

from tpi.kernels import _native
from tpi.kernels.normspec import LatentSpec, NormSpec, QueryLatentSpec
from tpi.pack.layout import RunLayout

PLAN = "native plan"  # key of the native plan in a spec's `__dict__`


def norm_fields(norm: NormSpec) -> _native.NormFields:
    """Return the description of a norm."""
    return (norm.kind, norm.eps, norm.weight, norm.bias)


def run_fields(run: RunLayout) -> _native.RunFields:
    """Return the description of a run."""
    parts = [(part.name, str(part.format), str(part.axis)) for part in run.parts]
    return (run.layout == "tiled", run.units, run.width, run.hidden, parts)


def latent_fields(latent: LatentSpec) -> _native.LatentFields:
    """Return the description of the latent vector of keys and values."""
    return (run_fields(latent.run), norm_fields(latent.norm), latent.rope, latent.width, latent.bias)


def query_latent_fields(latent: QueryLatentSpec) -> _native.QueryLatentFields:
    """Return the description of the latent vector of queries."""
    return (run_fields(latent.run), run_fields(latent.up), norm_fields(latent.norm), latent.bias)
