"""The two ends of the model that never leave the master: embedding and LM head."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tpi.block import embedded
from tpi.config import ModelConfig
from tpi.kernels import Kernels
from tpi.kernels.perlayer import layer_embeddings
from tpi.kernels.spec import NormSpec
from tpi.pack.layout import RunLayout
from tpi.trace import EMBEDDING, HEAD, OFF, NoTrace

F32 = npt.NDArray[np.float32]


class Rows(Protocol):
    """A table whose rows can be looked up, in memory or on disk."""

    def gather(self, rows: Sequence[int]) -> F32:
        """Return the rows `rows`, dequantized, `[len(rows), hidden]`."""


class Table(Rows, Protocol):
    """A table of vocabulary rows that a head also multiplies with."""

    def logits(self, x: F32) -> F32:
        """Return every row times every `x` `[tokens, hidden]`: `[tokens, padded vocabulary]`."""


class ResidentTable:
    """A table whose packed bytes `data` are all in memory, in the layout `run`."""

    def __init__(self, run: RunLayout, data: npt.NDArray[np.uint8], kernels: Kernels, trace: NoTrace = OFF) -> None:
        self.run = run
        self.data = data
        self._kernels = kernels
        self._trace = trace

    def gather(self, rows: Sequence[int]) -> F32:
        """Return the rows `rows`, dequantized, `[len(rows), hidden]`."""
        with self._trace.span("compute", EMBEDDING):
            return self._kernels.gather(self.run, self.data, np.asarray(rows, np.int32))

    def logits(self, x: F32) -> F32:
        """Return every row times every `x` `[tokens, hidden]`: `[tokens, padded vocabulary]`."""
        with self._trace.span("compute", HEAD):
            return self._kernels.logits(self.run, self.data, x)


class Embedding:
    """The layer that turns token ids into hidden states: scaled or normed table rows, plus any learned positions."""

    def __init__(self, config: ModelConfig, table: Rows, positions: Rows | None = None) -> None:
        """Create an embedding. `positions` is the table of learned positions (OPT), or None.

        Position p is row p + `config.position_offset` of that table.
        """
        self._config = config
        self._table = table
        self._positions = positions

    def __call__(self, tokens: Sequence[int], positions: Sequence[int]) -> F32:
        """Return the hidden states `[len(tokens), hidden]` float32 of `tokens` at `positions`."""
        x = embedded(self._config, self._table.gather(tokens))
        if self._positions is not None:
            x = x + self._positions.gather([position + self._config.position_offset for position in positions])
        return x


class PerLayerEmbeddings:
    """The embeddings of tokens for each layer (Gemma 4 E2B and E4B), which the layers get with the hidden states.

    An embedding is a scaled row of a table plus a normed projection of the token's first hidden state, divided by the
    root of 2.
    """

    def __init__(self, config: ModelConfig, table: Rows, projection: Table, norm: NormSpec, kernels: Kernels) -> None:
        self._config, self._table, self._projection = config, table, projection
        self._norm, self._kernels = norm, kernels

    def __call__(self, tokens: Sequence[int], x: F32) -> F32:
        """Return the embeddings of `tokens`, `[len(tokens), layers * values]`, layer after layer.

        `x` is their first hidden states, `[len(tokens), hidden]`.
        """
        rows, projected = self._table.gather(tokens), self._projection.logits(x)
        return layer_embeddings(self._kernels, self._config, self._norm, rows, projected)


class Head:
    """The layer that turns hidden states into logits: final norm, LM head, soft cap."""

    def __init__(
        self, config: ModelConfig, table: Table, norm: NormSpec, kernels: Kernels, trace: NoTrace = OFF
    ) -> None:
        """Create a head.

        `trace` records the time of the final norm and the soft cap. The table records the time of its own product,
        which may include waits for reads.
        """
        self._config = config
        self._table = table
        self._norm = norm
        self._kernels = kernels
        self._trace = trace

    def __call__(self, x: F32) -> F32:
        """Return float32 logits `[rows, vocab]` of `x` `[rows, hidden]`."""
        logits, cap = self._table.logits(self.norm(x))[:, : self._config.vocab], self._config.logit_softcap
        if self._config.logit_scale != 1.0:
            logits = logits * np.float32(self._config.logit_scale)
        if cap:
            with self._trace.span("compute", HEAD):
                logits = np.tanh(logits / cap) * np.float32(cap)
        return logits

    def with_norm(self, norm: NormSpec) -> "Head":
        """Return a head with the same table and another final norm."""
        return Head(self._config, self._table, norm, self._kernels, self._trace)

    def with_table(self, table: Table) -> "Head":
        """Return a head with the same final norm and another table."""
        return Head(self._config, table, self._norm, self._kernels, self._trace)

    def norm(self, x: F32) -> F32:
        """Return `x` `[rows, hidden]` after the final norm."""
        with self._trace.span("compute", HEAD):
            return self._kernels.norm(self._norm, x)
