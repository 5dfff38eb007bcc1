"""Types of command line flags that click lacks."""

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A range of finite numbers: `click.FloatRange` lets NaN through, and infinity where a side is open."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; fails with `click.BadParameter` unless it is finite and in the range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number
