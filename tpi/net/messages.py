"""The control plane's messages as frozen dataclasses. `tpi.net.codec` encodes and decodes them.

No message can carry text or token ids: prompts, tokens, the embedding and the head stay on the master. Messages between
a master and its workers carry a random 64-bit `session` (one per run of a master), and most of them an `epoch` (one per
plan), so that stale ones can be dropped. `tpi.net.transfers` has the messages of the weights plane.

master -> worker: Inquiry, Echo, Join, AskLink, AskDisk, Assign, Step, Abort, AskStats, AskSpans, Alive, Bye
worker -> master: Condition, Echo, Hello, Refuse, MeasuredLink, MeasuredDisk, Ready, Heartbeat, Stats, Spans,
    Failure, Bye
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np

from tpi.config import ModelConfig
from tpi.errors import MessageError
from tpi.kernels.kv import KvDtype
from tpi.net.codec import Raw, message
from tpi.net.fields import (
    DIGEST_BYTES,
    NOTHING_STREAMS,
    Bytes,
    Count,
    Digest,
    GroupBatch,
    Hidden,
    Id64,
    Key,
    Name,
    Phase,
    Port,
    Profile,
    Seconds,
    Sentence,
    UsualRequest,
    WindowState,
)
from tpi.pack.layout import BlockKind, RunLayout
from tpi.pack.routing import MAX_SENT_BYTES


@message
@dataclass(frozen=True)
class Join:
    """Request to a worker to serve this master. `name` is the master's name as the worker reports it to others."""

    version: Name
    session: Id64
    name: Name


@message
@dataclass(frozen=True)
class Hello:
    """A worker's acceptance of a Join, with the ports of its other planes."""

    version: Name
    session: Id64
    name: Name
    collective_port: Port
    weights_port: Port
    profile: Profile


@message
@dataclass(frozen=True)
class Refuse:
    """A worker's refusal of a Join, or of a master that it served so far.

    `in_use_by` is the name of the master that it serves, the first characters of a revoked key, or empty.
    """

    version: Name
    session: Id64
    reason: Literal["version", "in use", "twice", "revoked"]
    in_use_by: Name


@dataclass(frozen=True)
class RunPlan:
    """The units `[first, last)` of one run that a node holds. `hashes` are the units' digests, back to back."""

    layout: Count  # index into Assign.layouts
    first: Count
    last: Count
    hashes: Annotated[bytes, Raw(1 << 24)]

    def __post_init__(self) -> None:
        if self.first > self.last or len(self.hashes) != (self.last - self.first) * DIGEST_BYTES:
            raise MessageError(f"a run of units [{self.first}, {self.last}) has {len(self.hashes)} bytes of hashes")


@dataclass(frozen=True)
class VectorPlan:
    """A float32 vector (a norm, a bias) that every node holds in full."""

    name: Name
    length: Count


@dataclass(frozen=True)
class BlockPlan:
    """A node's part of one distinct block.

    `vectors_hash` is the hash of the bytes of `vectors`, back to back.
    """

    id: Digest
    kind: BlockKind
    runs: tuple[RunPlan, ...]
    vectors: tuple[VectorPlan, ...]
    vectors_hash: Digest


@dataclass(frozen=True)
class LayerPlan:
    """A layer that the node holds: its number in the model, and its blocks in order of use.

    Blocks are indices into Assign.blocks, where identical blocks are listed once.
    """

    number: Count
    blocks: tuple[Count, ...]


@dataclass(frozen=True)
class StagePlan:
    """The layers `[first, last)`, and the ranks of the nodes that hold them together, in ascending order."""

    first: Count
    last: Count
    ranks: tuple[Count, ...]


@dataclass(frozen=True)
class PredictorPlan:
    """A predictor of the active neurons among this node's neurons of a layer: see `tpi.sparsity.predictor.Predictor`.

    Its matrices are the vectors `first` and `second` of a block without units: their stored bytes, read as float32. The
    block may also have the vectors `bias` and `frequency` (how often each neuron is active).
    """

    layer: Count
    block: Count  # index into Assign.blocks
    rank: Count  # width between the two matrices
    neurons: Count
    weights: Literal["f16", "q8", "q4s"]
    given: Literal["normed", "residual"]
    ahead: Count  # number of layers that it predicts ahead
    threshold: float


@dataclass(frozen=True)
class PeerAddress:
    """Address of a rank's collective plane, as `tcp://host:port`, and the key that must answer there.

    Rank 0 only connects. Its address is that of the memory that it shares with its workers, or empty.
    """

    rank: Count
    name: Name
    address: Name
    key: Key = b""


@dataclass(frozen=True)
class NodeOptions:
    """Options with which a node runs its shard. 0 leaves a choice to the node."""

    context: Count  # tokens
    pages: Count  # requested size of the page pool; Ready.pages is the actual size
    kv_dtype: KvDtype
    prefill_tokens: Count  # most tokens in one step
    memory: Bytes = 0
    threads: Count = 0
    scheduler: Literal["resident", "window"] = "resident"
    window: Count = 0  # blocks
    retain: Count = 0  # blocks
    trace: bool = False  # record spans
    verify_weights: bool = False  # compare weights with their hashes when they are first loaded
    timeout_s: Seconds = 30.0  # an exchange without progress fails after this time
    sparsity: Literal["off", "auto", "static", "dynamic"] = "off"  # compute only the neurons predicted to be active
    batch: GroupBatch | None = None  # division of steps into micro-batches, equal on all nodes
    usual: UsualRequest | None = None  # if many requests are queued and their lengths are known

    @property
    def request(self) -> UsualRequest:
        """Assumed lengths of most requests. Without known lengths, half of the context is the prompt."""
        half = max(1, self.context // 2)
        return self.usual or UsualRequest(half, max(1, min(half, self.context - half)))


@message
@dataclass(frozen=True)
class Assign:
    """The part of one node in the plan `epoch`.

    The node loads its units from its cache or requests them, then answers with Ready.
    """

    session: Id64
    epoch: Count
    rank: Count
    size: Count
    config: ModelConfig
    layouts: tuple[RunLayout, ...]
    blocks: tuple[BlockPlan, ...]
    layers: tuple[LayerPlan, ...]
    stages: tuple[StagePlan, ...]
    peers: tuple[PeerAddress, ...]
    collective: Name
    wire: Name
    options: NodeOptions
    routing: Annotated[bytes, Raw(MAX_SENT_BYTES)] = b""  # an encoded `tpi.pack.routing.RoutingRecord`
    predictors: tuple[PredictorPlan, ...] = ()  # at most one per layer

    def __post_init__(self) -> None:
        for block in self.blocks:
            for run in block.runs:
                if run.layout >= len(self.layouts) or run.last > self.layouts[run.layout].units:
                    raise MessageError(f"block {block.id.hex()[:12]} names more units than its layout has")
        if any(index >= len(self.blocks) for layer in self.layers for index in layer.blocks):
            raise MessageError("a layer names a block that is not in the plan")
        if any(one.block >= len(self.blocks) for one in self.predictors):
            raise MessageError("a predictor is in a block that is not in the plan")
        if any(rank >= self.size for stage in self.stages for rank in stage.ranks):
            raise MessageError("a stage names a rank that is not in the plan")
        if not self.rank < self.size:
            raise MessageError(f"rank {self.rank} is not below the number of nodes, {self.size}")


@message
@dataclass(frozen=True)
class Ready:
    """Report that the shard of this plan is loaded.

    The master uses the smallest `pages` (size of the page pool) and the smallest `prefill_tokens` of all nodes.
    """

    session: Id64
    epoch: Count
    pages: Count
    prefill_tokens: Count  # the longest step that the node's memory allows
    weight_bytes: Bytes
    resident_bytes: Bytes
    fetched_bytes: Bytes  # weights transferred for this plan


@dataclass(frozen=True)
class StepEntry:
    """One sequence in a step: `count` tokens from `position` on.

    Its page table is the first `kept` pages of its table in the last step, followed by `appended`. `kept` is 0 at
    admission and after a new epoch. In models with recurrent layers, the sequence continues from the state in the slot
    `read - 1` (0: from the beginning), and its state after these tokens is written to the slot `write - 1`. If an
    earlier step of at most `STREAM_TOKENS` tokens wrote the state, its tokens from `position` on did not count.
    """

    sequence: Id64
    position: Count
    count: Count
    kept: Count
    appended: tuple[Count, ...]
    read: Count = 0
    write: Count = 0


@message
@dataclass(frozen=True)
class Step:
    """One pass over all blocks. `x` is float32 `[tokens, hidden]`, the sequences' rows in order: never token ids.

    It has no rows for nodes outside the first stage. `per_layer`, `[tokens, values]`, has the embeddings of the tokens
    for all layers, layer after layer; models without them have no values.
    """

    session: Id64
    epoch: Count
    step: Id64
    entries: tuple[StepEntry, ...]
    released: tuple[Id64, ...]  # sequences that ended since the last step
    x: Hidden
    per_layer: Hidden = field(default_factory=lambda: np.empty((0, 0), np.float32))

    def __post_init__(self) -> None:
        if len(self.x) not in (0, self.tokens):
            raise MessageError(f"a step has {len(self.x)} rows of hidden states, but its entries have {self.tokens}")

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(entry.count for entry in self.entries)


@message
@dataclass(frozen=True)
class Abort:
    """Request to give up the steps of `epoch` that are under way.

    The worker stays with its master and waits for an Assign.
    """

    session: Id64
    epoch: Count


@message
@dataclass(frozen=True)
class Heartbeat:
    """Sign of life that a worker's I/O thread sends at a fixed interval.

    `progress` grows whenever the compute thread completes a piece of work.
    """

    session: Id64
    epoch: Count
    progress: Id64
    phase: Phase
    step: Id64
    window: WindowState = NOTHING_STREAMS
    missed: Count = 0  # 1 + the rank whose late message is all that this node waits for; 0: none


@message
@dataclass(frozen=True)
class Failure:
    """Report that a node could not go on. `node` names the node at fault if it is another one; else it is empty."""

    session: Id64
    epoch: Count
    node: Name
    message: Sentence


@message
@dataclass(frozen=True)
class Alive:
    """Sign of life that the master sends at a fixed interval while it sends nothing else.

    It also shows that the master still reads.
    """

    session: Id64


@message
@dataclass(frozen=True)
class Bye:
    """Notice that the sender leaves its peer."""

    session: Id64


def master_identity(session: int, link: int | None = None) -> bytes:
    """Return the routing id of the socket that a run of a master, `session`, uses for its worker number `link`.

    If `link` is None, return the prefix that all routing ids of that run share.
    """
    return b"M" + session.to_bytes(8, "little") + (b"" if link is None else link.to_bytes(2, "little"))
