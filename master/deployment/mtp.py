"""The layer for multi-token prediction, which drafts tokens. The master holds it whole, with KV pages of its own.

From the token at position p + 1 and the model's hidden states at position p, it predicts the token at position p + 2.
DeepSeek-AI (2024), DeepSeek-V3 Technical Report, section 2.2; details as in vLLM, models/deepseek_mtp.py.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count

import numpy as np
import numpy.typing as npt

from allreduce.algorithms.loopback import Board
from allreduce.base import Endpoints
from master.deployment.assignments import assignments
from master.deployment.pages import PagePool
from master.deployment.stages import deal_stages
from master.vocabulary.vocabulary import Vocabulary
from master.workers.weights import own_blocks
from tpi.config import ModelConfig
from tpi.devices.host import HostDevice
from tpi.kernels.spec import NormSpec
from tpi.net.messages import NodeOptions, PeerAddress, StagePlan, Step, StepEntry
from tpi.pack.blockfile import BlockShape
from tpi.pack.reader import Pack
from worker.equipment import Equipment
from worker.node.node import Node
from worker.shards.cache import ShardCache

F32 = npt.NDArray[np.float32]


class MtpLayer:
    """The layer for multi-token prediction, in memory. It shares the embedding and the head's table with the model."""

    def __init__(self, pack: Pack, node: Node, vocabulary: Vocabulary, host: HostDevice) -> None:
        """Create the layer that `node` computes. Load its projection from `pack`.

        Raises:
            WeightsError: if the pack cannot be read.
        """
        projection, norms, *_ = pack.mtp
        vectors, config = norms.vectors(), pack.config
        self.node, self.config = node, config
        self.pages = PagePool(node.pages)
        self.nbytes = node.budget.used + projection.shape.nbytes  # bytes of memory
        self._vocabulary, self._kernels = vocabulary, host.kernels
        self._token, self._hidden, last = (
            NormSpec(config.norm, config.norm_eps, vectors[name]) for name in ("token", "hidden", "norm")
        )
        self._projection = vocabulary.resident(projection)
        self.head = vocabulary.head.with_norm(last)
        self._steps = count(1)

    @property
    def chunk(self) -> int:
        """The most rows of one call of `run`."""
        return self.node.prefill_tokens

    def normed(self, hidden: F32) -> F32:
        """Return the model's last hidden states `[rows, hidden]` after its final norm, as this layer reads them."""
        return self._vocabulary.head.norm(hidden)

    def run(self, entries: Sequence[StepEntry], released: Sequence[int], tokens: Sequence[int], hidden: F32) -> F32:
        """Compute rows; return the layer's hidden states `[rows, hidden]`, from which `head` computes logits.

        Args:
            entries: the sequences and positions of the rows.
            released: ids of sequences that ended since the last call.
            tokens: for the row at position p, the token at position p + 1.
            hidden: `[rows, hidden]`: for the row at position p, the model's hidden states at p, after `normed`. Where
                they are not known, this layer's own hidden states after `head.norm` take their place.
        """
        positions = [entry.position + row for entry in entries for row in range(entry.count)]
        embedded = self._vocabulary.embedding(tokens, [position + 1 for position in positions])
        if not self.config.mtp_whole:
            embedded[np.array(positions) == 0] = 0  # as the layer was trained
        halves = (self._kernels.norm(self._token, embedded), self._kernels.norm(self._hidden, hidden))
        x = self._projection.logits(np.concatenate(halves, axis=1))[:, : self.config.hidden]
        empty = np.empty((len(x), 0), np.float32)
        step = Step(0, 0, next(self._steps), tuple(entries), tuple(released), np.ascontiguousarray(x), empty)
        out = self.node.run(step)
        assert out is not None  # a node alone has the result
        return out


def open_mtp(
    stack: ExitStack, pack: Pack, options: NodeOptions, vocabulary: Vocabulary, host: HostDevice, cache: ShardCache
) -> MtpLayer:
    """Load the layer for multi-token prediction of `pack` into memory; `stack` releases it.

    `options` has the memory for it (0: no limit), its pages and the threads of its node.

    Raises:
        PlanError: if it does not fit into `options.memory`.
        WeightsError: if the pack cannot be read, or is damaged.
    """
    own = replace(
        pack.manifest, config=one_layer(pack.config, options.context), layers=(pack.manifest.mtp[2:],), per_layer=()
    )
    layer, projection = Pack(pack.path, own), pack.mtp[0].shape.nbytes
    options = replace(options, memory=options.memory and max(1, options.memory - projection))
    stages = deal_stages(layer, [StagePlan(0, 1, (0,))], [1.0])
    (plan,) = assignments(layer, stages, [PeerAddress(0, "master", "")], options, 0, 0, "loopback")
    held = own_blocks(layer, plan, cache)
    node = Equipment(host).build(plan, held, Endpoints(board=Board(1)), lambda done, total: None)
    stack.callback(node.close)
    return MtpLayer(pack, node, vocabulary, host)


def words(shapes: Sequence[BlockShape], taken: int | None) -> str:
    """Return a sentence for the user: the memory that the layer takes, or that the layer does not fit.

    Args:
        shapes: the shapes of the layer's projection, norms and blocks.
        taken: bytes of memory that the layer takes; None if it does not fit.
    """
    if taken is not None:
        return f"the layer for multi-token prediction takes {taken >> 20} MiB of this node's memory"
    return (
        f"the model's layer for multi-token prediction does not draft: its {sum(each.nbytes for each in shapes) >> 20} "
        "MiB and its pages do not fit into what is left of this node's memory; raise --memory to use it"
    )


def one_layer(config: ModelConfig, context: int) -> ModelConfig:
    """Return the configuration of the layer as a model of one layer.

    It has full attention, and RoPE if the model's layers with full attention have it.
    """
    kinds = [kind for layer, kind in enumerate(config.rope_kinds) if not config.window(layer)][:1]
    own = replace(config.for_context(context), layers=1, windows=(), rope_kinds=tuple(kinds))
    return replace(own, recurrent=(), delta=None, mamba=None)
