"""Detection of infinities and NaN in results, so that they raise an error instead of spreading."""

import numpy as np
import numpy.typing as npt

from tpi.errors import NotFiniteError

SUSPECT = "a node computes wrongly, or its weights are damaged; run with --verify-weights to find out which"


def require_finite(values: npt.NDArray[np.float32], what: str, reason: str = SUSPECT) -> None:
    """Raise an error if `values` contains infinities or NaN.

    The check takes microseconds for the hidden states of one token.

    Raises:
        NotFiniteError: if a value is not finite; the message names `what` and gives the `reason`.
    """
    if not np.isfinite(values).all():
        raise NotFiniteError(f"{what} is not finite: {reason}")
