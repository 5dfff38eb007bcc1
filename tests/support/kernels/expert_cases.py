"""Random packed blocks of experts, for the tests of the kernels for experts."""

from dataclasses import dataclass, replace

import numpy as np

from tests.support.kernels.kernel_cases import Random, ffn_case, norm_spec, normal
from tpi.config import Format, Mixture
from tpi.kernels.spec import F32, U8, ExpertPiece, ExpertsSpec, RouterSpec
from tpi.pack.layout import Layout


@dataclass(frozen=True)
class ExpertsCase:
    spec: ExpertsSpec
    data: U8
    x: F32


def experts_case(
    random: Random,
    *,
    format: Format = "f32",
    layout: Layout | None = None,
    hidden: int = 64,
    experts: int = 6,
    used: int = 2,
    units: int = 2,
    shared: int = 0,
    shared_format: Format | None = None,
    gate: bool = False,
    tokens: int = 1,
    bias: bool = False,
    pieces: tuple[ExpertPiece, ...] | None = None,
    mixture: Mixture | None = None,
) -> ExpertsCase:
    """Return a random block. `pieces` are by default all experts, with `units` units each; `shared` counts units."""
    mine = tuple(ExpertPiece(expert, units) for expert in range(experts)) if pieces is None else pieces
    total = sum(piece.units for piece in mine)
    case = ffn_case(random, format=format, layout=layout, hidden=hidden, units=total, tokens=tokens, bias=bias)
    settings = mixture or Mixture(experts, used, 32 * units, 32 * shared, normalised=True, scale=1.5)
    router = RouterSpec(
        mixture=settings,
        norm=norm_spec(random, "rms", hidden),
        weight=normal(random, experts, hidden),
        bias=normal(random, experts) if bias else None,
        choice=normal(random, experts) if bias else None,
        shared=normal(random, hidden) if gate else None,
    )
    beside = ffn_case(random, format=shared_format or format, hidden=hidden, units=shared) if shared else None
    spec = ExpertsSpec(
        replace(case.spec, norm=router.norm),
        mine,
        replace(beside.spec, norm=router.norm) if beside else None,
        router,
    )
    data = np.concatenate([beside.data, case.data]) if beside else case.data
    return ExpertsCase(spec, data, case.x)
