"""Sums of squares that travel with a partial result, for a norm over the heads of all nodes (`SpreadNorm`).

The sums are in rows that follow the tokens' rows, divided by the root of the number of values. Each sum is repeated to
fill a group of 32 values, which has its own scale in the wire format q8. So one token's sum is not rounded to the scale
of another's. Root mean squares from 1e-3 to 400 stay within the range of a scale.
"""

import numpy as np

from tpi.kernels.spec import F32, MambaSpec, RecurrentSpec, SpreadNorm
from tpi.pack.layout import GROUP


def square_rows(spec: RecurrentSpec, tokens: int) -> int:
    """Return the number of rows with sums of squares that follow the rows of `tokens` tokens in a partial result.

    Return 0 without a spread norm.
    """
    return _rows(tokens, spec.hidden) if isinstance(spec, MambaSpec) and spec.spread else 0


def attach(partial: F32, squares: F32, norm: SpreadNorm) -> F32:
    """Return the partial result `[tokens, hidden]` followed by rows with the sums `squares`, `[tokens]`.

    The sums are stored as the docstring of this module says.
    """
    rows = np.zeros((_rows(*partial.shape), partial.shape[1]), np.float32)
    rows.reshape(-1)[: len(squares) * GROUP] = np.repeat(squares * np.float32(norm.values**-0.5), GROUP)
    return np.concatenate([partial, rows])


def apply_spread(norm: SpreadNorm, total: F32, tokens: int) -> F32:
    """Return the first `tokens` rows of `total`, the sum over all nodes, after the norm: `[tokens, hidden]`. The
    further rows of `total` hold the sums of squares.
    """
    squares = total[tokens:].reshape(-1)[: tokens * GROUP : GROUP]
    factor = 1 / np.sqrt(squares * np.float32(norm.values**-0.5) + np.float32(norm.eps))
    return np.asarray(total[:tokens] * factor[:, None], np.float32)


def _rows(tokens: int, hidden: int) -> int:
    return -(-tokens * GROUP // hidden)
