"""Parameter grids in which each value of an axis is combined with each instruction set of this machine."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.kernels.kernel_cases import native
from tests.support.kernels.pairwise import pairwise

ISAS = native.available_isas()
each_isa = pytest.mark.parametrize("isa", ISAS, indirect=True)


def over_isas(names: Sequence[str], *axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test over pairs of the axes `names` and the instruction sets, which go to the fixture `isa`."""
    return pytest.mark.parametrize(("isa", *names), pairwise(ISAS, *axes), indirect=["isa"])
