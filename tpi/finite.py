"""Results that are no numbers: found where they would otherwise go on unseen, and named."""

import numpy as np
import numpy.typing as npt

from tpi.errors import NotFiniteError

SUSPECT = "a node computes wrongly, or its weights are damaged; --verify-weights says which"


def require_finite(values: npt.NDArray[np.float32], what: str, reason: str = SUSPECT) -> None:
    """Refuse infinities and NaN; microseconds for the hidden states of one token.

    Raises:
        NotFiniteError: saying that `what` is not finite, and the `reason`.
    """
    if not np.isfinite(values).all():
        raise NotFiniteError(f"{what} is not finite: {reason}")
