"""Loading of a draft model (`--draft`): a node of its own in the master's process, with weights and pages in memory."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from master.deployment.deploy import Deployer, own_threads
from master.deployment.deployment import Deployment
from master.deployment.stages import ONE
from master.options import DEFAULT_CONTEXT, RunOptions
from master.text.tokenizer import Tokenizer
from master.workers.cluster import Cluster
from scheduler.budget import Budget
from tpi.config import ModelConfig
from tpi.devices.host import HostDevice
from tpi.errors import PlanError, UsageError
from tpi.net.sockets import Net
from tpi.pack.library.locate import locate, open_located
from tpi.progress import note
from worker.equipment import Equipment

DTYPE = "q4"  # drafts need not be exact, and the smaller the weights, the sooner they are read
NO_EFFECT = (
    "--draft has no effect on a model with experts that are not all in memory, nor with --sparsity or an accelerator; "
    "leave it out"
)


@dataclass(frozen=True)
class LoadedDraft:
    """A draft model in memory: its deployment, its tokenizer, and its size in bytes."""

    deployment: Deployment
    tokenizer: Tokenizer
    nbytes: int

    def refuse_other_tokenizer(self, tokenizer: Tokenizer, options: RunOptions) -> None:
        """Check that the draft model's tokenizer agrees with `tokenizer`, the large model's.

        Raises:
            UsageError: if the two give different ids to the same text.
        """
        if not tokenizer.agrees_with(self.tokenizer):
            raise UsageError(
                f"--draft {options.draft} has another tokenizer than {options.model}; give a smaller model of the same "
                "family, or leave --draft out"
            )


@contextmanager
def load_draft(options: RunOptions, host: HostDevice, make_room: Callable[[], None]) -> Iterator[LoadedDraft]:
    """Load the model `options.draft` in q4 on `host`, with pages for one full context.

    Release it at the end of the block.

    Raises:
        ModelError, WeightsError: if the model is unknown, damaged or not supported.
        PlanError: if the model does not fit into this node's memory.
        UsageError: if the model has recurrent layers, whose states cannot take wrong drafts back.
    """
    assert options.draft is not None
    pack = open_located(locate(options.draft, options.cache), DTYPE, options.cache)
    refuse_recurrent(options.draft, pack.config)
    alone = RunOptions(
        model=options.draft,
        memory=options.memory,
        local_memory=options.local_memory,
        threads=own_threads(options),
        scheduler=options.scheduler,
        sparsity="off",
        stages=ONE,
        verify_weights=options.verify_weights,
        cache=options.cache,
    )
    context = min(options.context or DEFAULT_CONTEXT, pack.config.context)
    with Cluster.connect((), Net()) as nobody:
        deployer = Deployer(alone, nobody, pack, context, Equipment(host), make_room)
        with closing(_deployed(deployer, options.draft)) as deployment:
            nbytes = deployment.node.budget.used
            note(f"the draft model takes {nbytes >> 20} MiB of this node's memory")
            yield LoadedDraft(deployment, Tokenizer.load(pack), nbytes)


def _deployed(deployer: Deployer, draft: str) -> Deployment:
    """Return the deployment of the draft model.

    Raises:
        PlanError: if the model does not fit into memory as a whole.
    """
    try:
        deployment = deployer.deploy([1.0])
    except PlanError as error:
        raise PlanError(f"--draft {draft}: {error}", error.node) from error
    try:
        refuse_streamed(draft, deployment.node.budget)
    except PlanError:
        deployment.close()
        raise
    return deployment


def refuse_recurrent(draft: str, config: ModelConfig) -> None:
    """Raise UsageError if the draft model has recurrent layers."""
    if any(config.recurrent):
        raise UsageError(f"--draft {draft} has recurrent layers, which cannot take drafts back; give another model")


def refuse_streamed(draft: str, budget: Budget) -> None:
    """Raise PlanError if some of the draft model's weights would have to be read from disk for each token."""
    if budget.placement.streamed_bytes:
        raise PlanError(
            f"--draft {draft} does not fit into this node's memory; raise --memory, or give a smaller model"
        )
