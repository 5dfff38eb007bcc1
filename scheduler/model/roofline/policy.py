"""The policy of a batch (MoE-Lightning's 6-tuple, table 1, and the disk's share), and the problem that it solves."""

from dataclasses import dataclass, field

from scheduler.model.machine import NodeMachine
from scheduler.model.offload.memory import Needs
from scheduler.model.offload.work import KvTier, TableWork, Tier
from scheduler.model.roofline.layer import LayerShape
from tpi.kernels.constants import PAGE_TOKENS


@dataclass(frozen=True)
class BatchWork:
    """The sequences to compute: at most `most` at once. `prompt` and `answer` are their mean tokens."""

    most: int
    prompt: int
    answer: int

    @property
    def context(self) -> float:
        """Tokens of a sequence in the middle of its answer."""
        return self.prompt + (self.answer + 1) / 2

    @property
    def room(self) -> int:
        """Tokens that a sequence's pages hold at its end."""
        return -(-(self.prompt + self.answer) // PAGE_TOKENS) * PAGE_TOKENS


@dataclass(frozen=True)
class PolicyLimits:
    """Choices that the user fixed; None: not fixed.

    Attributes:
        attention_there, ffn_there: A_g and F_g, whether the accelerator computes attention and neurons.
        weights: where all weights are. With `gpu`, all that the accelerator computes with are resident on it; other
        weights stay in RAM.
        kv: where all keys and values are; if they are in the accelerator's memory, it attends.
        kv_heads: number of KV heads, each of which is on one side; 0: r_c may be any share; 1: all or none.
        micro_batches: number of micro-batches, in every batch with at least as many sequences.
        batch: N, the sequences at once.
    """

    attention_there: bool | None = None
    ffn_there: bool | None = None
    weights: Tier | None = None
    kv: KvTier | None = None
    kv_heads: int = 0
    micro_batches: int | None = None
    batch: int | None = None

    def allow(self, attention: bool, ffn: bool, divided: bool = False) -> bool:
        """Return True if the limits allow these places for attention and neurons (True: the accelerator).

        `divided` is True if keys and values are on both sides.
        """
        if divided and (self.kv is not None or self.kv_heads == 1 or not (attention or ffn)):
            return False
        asked = ((self.attention_there, attention), (self.ffn_there, ffn), (self.kv == "gpu" or None, attention))
        return all(want is None or want == given for want, given in asked)


@dataclass(frozen=True)
class SumCost:
    """Seconds of one sum over all nodes of a group: `start`, and `token` for each token in it; 0 for a single node.

    A layer has two sums for every micro-batch.
    """

    start: float = 0.0
    token: float = 0.0


@dataclass(frozen=True)
class BatchProblem:
    """A model on a machine for a batch.

    Attributes:
        layer: the model's mean layer.
        machine: the node.
        request: the sequences.
        needs: memory needs in addition to weights, keys and values.
        chunk: the most tokens of prompts that are computed at once.
        step: the most tokens of prompts in one step: chunks for which weights cross the link once; 0: one chunk.
        head: the head, which the host computes.
        limits: choices that the user fixed.
        pool: the least number of sequences with pages; 0: as many as are computed at once.
        passing: bytes of RAM for each token of a step, in addition to the activations of one chunk; 0: every token
            of a step needs its activations at once.
        sums: the cost of sums over the group's nodes.
    """

    layer: LayerShape
    machine: NodeMachine
    request: BatchWork
    needs: Needs
    chunk: int = 512
    step: int = 0
    head: TableWork = field(default_factory=TableWork)
    limits: PolicyLimits = field(default_factory=PolicyLimits)
    pool: int = 0
    passing: float = 0.0
    sums: SumCost = field(default_factory=SumCost)

    @property
    def together(self) -> tuple[int, int]:
        """The most prompt tokens in a chunk, and the most in a step."""
        every = self.request.prompt * self.request.most
        return min(self.chunk, every), min(max(self.step, self.chunk), every)


@dataclass(frozen=True)
class BatchPolicy:
    """The policy of a batch.

    Attributes:
        batch: N, the sequences at once.
        micro_batches: N over mu, rounded up.
        attention_there: A_g, whether the accelerator attends with keys and values from RAM; it always attends with
            keys and values in its own memory.
        ffn_there: F_g, whether the accelerator computes neurons.
        weights_kept: r_w, the share of all weights that is resident on the accelerator.
        kv_kept: r_c, the share of keys and values that is resident there.
        weights_on_disk: the share of all weights that is read from disk for every use.
        adds_there: whether the accelerator adds residual connections, for which hidden states cross the link once more
            each way; else the host adds them.
    """

    batch: int
    micro_batches: int
    attention_there: bool = False
    ffn_there: bool = False
    weights_kept: float = 0.0
    kv_kept: float = 0.0
    weights_on_disk: float = 0.0
    adds_there: bool = True

    @property
    def divided(self) -> bool:
        """True if some keys and values are on the accelerator and others in RAM."""
        return 0 < self.kv_kept < 1

    @property
    def micro_batch(self) -> int:
        """Sequences of the largest micro-batch, mu."""
        return -(-self.batch // self.micro_batches)
