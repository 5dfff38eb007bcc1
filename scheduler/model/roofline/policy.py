"""What is decided for a batch, and what for: MoE-Lightning's 6-tuple (table 1), with the disk beside it."""

from dataclasses import dataclass, field

from scheduler.model.machine import NodeMachine
from scheduler.model.offload.memory import Needs
from scheduler.model.offload.work import KvTier, TableWork, Tier
from scheduler.model.roofline.layer import LayerShape
from tpi.kernels.constants import PAGE_TOKENS


@dataclass(frozen=True)
class BatchWork:
    """`most` sequences that wait, each with a prompt and an answer of so many tokens (means)."""

    most: int
    prompt: int
    answer: int

    @property
    def context(self) -> float:
        """Tokens of a sequence in the middle of its answer."""
        return self.prompt + (self.answer + 1) / 2

    @property
    def room(self) -> int:
        """Tokens that the pages of a sequence hold at its end."""
        return -(-(self.prompt + self.answer) // PAGE_TOKENS) * PAGE_TOKENS


@dataclass(frozen=True)
class PolicyLimits:
    """What is insisted on; None: choose.

    Attributes:
        attention_there, ffn_there: A_g and F_g.
        weights: where all of them lie: what the accelerator computes with, in its own memory.
        kv: where all keys and values lie; in the accelerator's memory it attends.
        kv_heads: of how many heads they are, of which each lies on one side; 0: any share may, 1: all or none.
        micro_batches: how many, of every batch that has as many sequences.
        batch: N.
    """

    attention_there: bool | None = None
    ffn_there: bool | None = None
    weights: Tier | None = None
    kv: KvTier | None = None
    kv_heads: int = 0
    micro_batches: int | None = None
    batch: int | None = None

    def allow(self, attention: bool, ffn: bool, divided: bool = False) -> bool:
        """Whether attention and neurons may be computed on the accelerator, or not, with keys and values `divided`."""
        if divided and (self.kv is not None or self.kv_heads == 1 or not (attention or ffn)):
            return False
        asked = ((self.attention_there, attention), (self.ffn_there, ffn), (self.kv == "gpu" or None, attention))
        return all(want is None or want == given for want, given in asked)


@dataclass(frozen=True)
class SumCost:
    """Seconds of one sum over all nodes of a group: `start`, and `token` for each token in it; a node alone has none.

    A layer has two for every micro-batch.
    """

    start: float = 0.0
    token: float = 0.0


@dataclass(frozen=True)
class BatchProblem:
    """A model on a machine for a batch.

    Attributes:
        chunk: the most tokens that are computed with at once, of prompts.
        step: the most tokens of prompts for which weights cross the link once; 0: one chunk.
        head: the host's.
        pool: sequences that there are pages for, however many are computed at once; 0: as many.
        passing: bytes of RAM of one token of a step, where but a chunk of it is computed with at once; 0: as computing.
        sums: what the nodes of a group wait for.
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
        """Tokens of prompts in a chunk, and in a step, if there are as many."""
        every = self.request.prompt * self.request.most
        return min(self.chunk, every), min(max(self.step, self.chunk), every)


@dataclass(frozen=True)
class BatchPolicy:
    """The decision.

    Attributes:
        batch: N, sequences at once; micro_batches: N over mu, rounded up.
        attention_there: A_g, whether the accelerator attends with keys and values that come from RAM; with those that
            stay in its memory it always does. ffn_there: F_g, whether it computes neurons.
        weights_kept: r_w, the share of all weights that stays there; kv_kept: r_c, of keys and values.
        weights_on_disk: the share of all weights that is read from disk for every use.
        adds_there: whether the accelerator adds residual connections, to where hidden states then cross once more each
            way; else the host does, beside it.
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
        """Whether some keys and values stay on the accelerator, and others in RAM."""
        return 0 < self.kv_kept < 1

    @property
    def micro_batch(self) -> int:
        """mu: sequences of the largest micro-batch."""
        return -(-self.batch // self.micro_batches)
