"""The control plane's messages as frozen dataclasses; `tpi.net.codec` turns them into frames and back.

No message can carry text or token ids: prompts, tokens, the embedding and the head stay on the master. A random 64-bit
`session` (one per master run) and an `epoch` (one per plan) fence them. The weights plane has `tpi.net.transfers`.

master -> worker: Inquiry, Echo, Join, Assign, Step, Abort, AskStats, AskSpans, Alive, Bye
worker -> master: Condition, Echo, Hello, Refuse, Ready, Heartbeat, Stats, Spans, Failure, Bye
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from tpi.config import ModelConfig
from tpi.errors import MessageError
from tpi.kv import KvDtype
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
from tpi.net.questions import AskSpans, AskStats, Condition, Echo, Inquiry, Spans, Stats
from tpi.pack.layout import BlockKind, RunLayout
from tpi.pack.routing import MOST_TOLD


@message
@dataclass(frozen=True)
class Join:
    """Asks a worker to serve this master. `name` is how the worker names the master to others."""

    version: Name
    session: Id64
    name: Name


@message
@dataclass(frozen=True)
class Hello:
    """The worker's consent, with the ports of its other planes."""

    version: Name
    session: Id64
    name: Name
    collective_port: Port
    weights_port: Port
    profile: Profile


@message
@dataclass(frozen=True)
class Refuse:
    """The worker's refusal of a Join, or of a master that it served.

    `in_use_by` names the master that it serves, or the beginning of the key that was revoked, or is empty.
    """

    version: Name
    session: Id64
    reason: Literal["version", "in use", "twice", "revoked"]
    in_use_by: Name


@dataclass(frozen=True)
class RunPlan:
    """The units `[first, last)` of one run that a node holds; `hashes` are their digests, back to back."""

    layout: Count  # index into Assign.layouts
    first: Count
    last: Count
    hashes: Annotated[bytes, Raw(1 << 24)]

    def __post_init__(self) -> None:
        if self.first > self.last or len(self.hashes) != (self.last - self.first) * DIGEST_BYTES:
            raise MessageError(f"a run of units [{self.first}, {self.last}) has {len(self.hashes)} bytes of hashes")


@dataclass(frozen=True)
class VectorPlan:
    """One float32 vector (a norm, a bias) that every node has whole."""

    name: Name
    length: Count


@dataclass(frozen=True)
class BlockPlan:
    """What a node holds of one distinct block. `vectors_hash` is of the vectors' bytes, back to back in this order."""

    id: Digest
    kind: BlockKind
    runs: tuple[RunPlan, ...]
    vectors: tuple[VectorPlan, ...]
    vectors_hash: Digest


@dataclass(frozen=True)
class LayerPlan:
    """One layer: its blocks in order of use, as indices into Assign.blocks (identical ones are listed once), and the
    ranks that hold it."""

    blocks: tuple[Count, ...]
    ranks: tuple[Count, ...]


@dataclass(frozen=True)
class PredictorPlan:
    """What predicts which of this node's neurons of a layer are active: see `tpi.sparsity.predictor.Predictor`.

    Its matrices are the vectors `first` and `second` of a block without units: their bytes as they are kept, read as
    float32; with `bias` where there is one, and `frequency`, how often each neuron is active, where that is known.
    """

    layer: Count
    block: Count  # index into Assign.blocks
    rank: Count  # values between the matrices
    neurons: Count
    weights: Literal["f16", "q8", "q4s"]
    given: Literal["normed", "residual"]
    ahead: Count  # layers
    threshold: float


@dataclass(frozen=True)
class GatePlan:
    """What of this node's neurons of a layer may be left out for what their gate comes to.

    `block` has no units and one vector, `least`: of each of these neurons the smallest activation with which it is
    computed (`tpi.kernels.gated.GatedKernels`).
    """

    layer: Count
    block: Count  # index into Assign.blocks


@dataclass(frozen=True)
class PeerAddress:
    """Where the collective plane of a rank listens, as `tcp://host:port`, and whose key is to answer there.

    Rank 0 only connects: its address is that of the memory which it shares with its workers, or empty.
    """

    rank: Count
    name: Name
    address: Name
    key: Key = b""


@dataclass(frozen=True)
class NodeOptions:
    """How a node runs its shard. 0 leaves a choice to the node."""

    context: Count  # tokens
    pages: Count  # asked for; the node answers with what it has
    kv_dtype: KvDtype
    prefill_tokens: Count  # the most tokens in one step
    memory: Bytes = 0
    threads: Count = 0
    scheduler: Literal["resident", "window"] = "resident"
    window: Count = 0  # blocks
    retain: Count = 0  # blocks
    trace: bool = False  # record spans
    verify_weights: bool = False  # compare them with their hashes when they are first loaded
    timeout_s: Seconds = 30.0  # of an exchange that makes no progress
    sparsity: Literal["off", "auto", "static", "dynamic"] = "off"  # compute predicted neurons alone
    batch: GroupBatch | None = None  # steps in micro-batches, all nodes alike
    usual: UsualRequest | None = None  # where many wait and their lengths are known

    @property
    def request(self) -> UsualRequest:
        """What most requests are taken to be: half of the context is prompt, where nothing is known."""
        half = max(1, self.context // 2)
        return self.usual or UsualRequest(half, max(1, min(half, self.context - half)))


@message
@dataclass(frozen=True)
class Assign:
    """A node's part of the plan `epoch`. The node takes its units from its cache or asks for them, then is Ready."""

    session: Id64
    epoch: Count
    rank: Count
    size: Count
    config: ModelConfig
    layouts: tuple[RunLayout, ...]
    blocks: tuple[BlockPlan, ...]
    layers: tuple[LayerPlan, ...]
    peers: tuple[PeerAddress, ...]
    collective: Name
    wire: Name
    options: NodeOptions
    routing: Annotated[bytes, Raw(MOST_TOLD)] = b""  # recorded, see `tpi.pack.routing.RoutingRecord`
    predictors: tuple[PredictorPlan, ...] = ()  # one a layer at most
    gates: tuple[GatePlan, ...] = ()  # the same

    def __post_init__(self) -> None:
        for block in self.blocks:
            for run in block.runs:
                if run.layout >= len(self.layouts) or run.last > self.layouts[run.layout].units:
                    raise MessageError(f"block {block.id.hex()[:12]} has units beyond its layout")
        if any(index >= len(self.blocks) for layer in self.layers for index in layer.blocks):
            raise MessageError("a layer names a block that is not in the plan")
        sent = [one.block for one in self.predictors] + [one.block for one in self.gates]
        if max(sent, default=-1) >= len(self.blocks):
            raise MessageError("a predictor is in a block that is not in the plan")
        if any(rank >= self.size for layer in self.layers for rank in layer.ranks):
            raise MessageError("a layer names a rank that is not in the plan")
        if not self.rank < self.size:
            raise MessageError(f"rank {self.rank} is not below the number of nodes, {self.size}")


@message
@dataclass(frozen=True)
class Ready:
    """The shard of this plan is loaded. `pages` is the size of its pool; the smallest of all counts."""

    session: Id64
    epoch: Count
    pages: Count
    prefill_tokens: Count  # the longest step that its memory allows; the smallest of all counts
    weight_bytes: Bytes
    resident_bytes: Bytes
    fetched_bytes: Bytes  # weights that travelled for this plan


@dataclass(frozen=True)
class StepEntry:
    """One sequence in a step: `count` tokens from `position` on, in a table of the first `kept` pages that it had in
    the last step, and those `appended`.

    At admission and after a new epoch `kept` is 0.
    """

    sequence: Id64
    position: Count
    count: Count
    kept: Count
    appended: tuple[Count, ...]


@message
@dataclass(frozen=True)
class Step:
    """One pass over all blocks. `x` is float32 `[tokens, hidden]`, the sequences' rows in order: never token ids."""

    session: Id64
    epoch: Count
    step: Id64
    entries: tuple[StepEntry, ...]
    released: tuple[Id64, ...]  # sequences that ended since the last step
    x: Hidden

    def __post_init__(self) -> None:
        if sum(entry.count for entry in self.entries) != len(self.x):
            raise MessageError(f"a step has {len(self.x)} rows of hidden states, but its entries count otherwise")


@message
@dataclass(frozen=True)
class Abort:
    """Gives up the steps of `epoch` that are under way; the worker stays with its master and waits for an Assign."""

    session: Id64
    epoch: Count


@message
@dataclass(frozen=True)
class Heartbeat:
    """Sent at an interval by the I/O thread. `progress` grows whenever the compute thread gets anything done."""

    session: Id64
    epoch: Count
    progress: Id64
    phase: Phase
    step: Id64
    window: WindowState = NOTHING_STREAMS
    missed: Count = 0  # 1 + the rank whose message is late, though this node waits for nothing else; 0: no such


@message
@dataclass(frozen=True)
class Failure:
    """A node could not go on. `node` is the one at fault, where that is another one; else empty."""

    session: Id64
    epoch: Count
    node: Name
    message: Sentence


@message
@dataclass(frozen=True)
class Alive:
    """Sent by the master at an interval in which it sends nothing else: it lives, and reads."""

    session: Id64


@message
@dataclass(frozen=True)
class Bye:
    """The sender leaves."""

    session: Id64


def master_identity(session: int, link: int | None = None) -> bytes:
    """Routing id of a master's sockets towards its worker number `link`; without one, how they all begin."""
    return b"M" + session.to_bytes(8, "little") + (b"" if link is None else link.to_bytes(2, "little"))


ToWorker = Inquiry | Echo | Join | Assign | Step | Abort | AskStats | AskSpans | Alive | Bye
ToMaster = Condition | Echo | Hello | Refuse | Ready | Heartbeat | Stats | Spans | Failure | Bye
