"""SwiGLU models with `--sparsity`: whether neurons are chosen by their gate, and which pack is used."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from master.deployment.deploy import own_threads
from master.deployment.predictors import same_pack
from master.deployment.sentgates import SentGates
from master.options import RunOptions
from tpi.errors import TpiError, UsageError
from tpi.kernels import Kernels
from tpi.kernels.gated import GatedKernels
from tpi.pack.blockfile import BlockShape
from tpi.pack.builder.build import open_source
from tpi.pack.builder.plan import can_be_gate_first, plan_pack
from tpi.pack.library.locate import Located, open_located
from tpi.pack.reader import Pack
from tpi.progress import warn
from tpi.sparsity.gates import GateCurves, load_curves
from tpi.sparsity.thresholds import NAME
from worker.neurons.gates.judge import Compared, compare_layouts


@dataclass(frozen=True)
class GateFirstPack:
    """A model's gate-first pack: it is stored next to the ordinary one, and made when it is first needed."""

    located: Located
    dtype: str
    cache: Path
    room: Callable[[int], None]

    def open(self) -> Pack:
        """Return the pack; make it first if there is none.

        Raises:
            TpiError: as `tpi.pack.library.locate.open_located`.
        """
        return open_located(self.located, self.dtype, self.cache, room=self.room, gate_first=True)

    def shape(self) -> BlockShape:
        """Return the shape of its first feed-forward block, without making the pack."""
        opened = open_source(self.located.path)
        try:
            plan = plan_pack(opened.model, opened.source, self.dtype, gate_first=True)
        finally:
            opened.source.close()
        return next(block.shape for layer in plan.layers for block in layer if block.kind == "ffn")


@dataclass(frozen=True)
class GateChooser:
    """The decision on `--sparsity` for a SwiGLU model whose neurons `nodes` nodes share."""

    options: RunOptions
    nodes: int
    kernels: Kernels  # of this machine's CPU
    accelerated: bool  # whether any node has an accelerator, which would compute the blocks

    def choose(self, pack: Pack, beside: GateFirstPack | None) -> tuple[Pack, SentGates | None]:
        """Return the pack to use, and the gates' thresholds.

        The pack is `pack`, or the gate-first pack `beside` (None if no such pack can be made). The thresholds are None
        if all neurons are computed, or if the model is of another kind.

        Raises:
            UsageError: if neurons are to be chosen, but there is no profile, or no pack for it.
            ModelError: if the profile is damaged.
        """
        mode, config = self.options.sparsity, pack.config
        if mode == "off" or not can_be_gate_first(config):
            return pack, None
        curves = load_curves(pack.path / NAME, config.layers, config.intermediate)
        refusal = self._refusal(pack, curves, beside)
        if curves is None or refusal:
            if mode == "auto":
                return pack, None
            raise UsageError(f"--sparsity {mode}: {refusal}")
        gates = SentGates(curves, self.options.sparsity_error)
        if is_gate_first(pack) or beside is None:
            return pack, gates
        return self._if_it_pays(pack, beside, gates) if mode == "auto" else (beside.open(), gates)

    def _refusal(self, pack: Pack, curves: GateCurves | None, beside: GateFirstPack | None) -> str:
        """Return why neurons cannot be chosen, and what to do; empty if they can."""
        model = self.options.model
        if curves is None:
            return (
                f"{model} has no profile of what may be left out after its gates; make it with: "
                f"tpi profile {same_pack(self.options)} --text FILE"
            )
        if beside is None and not is_gate_first(pack):
            return (
                f"the pack {model} stores gate, up and down together; give the model it was made from, or pack that "
                "again with tpi pack --gate-first"
            )
        if self.accelerated:
            return (
                f"neurons of {model} are chosen by their gate, on the CPU alone, and a node has an accelerator; use "
                "--device cpu there"
            )
        return ""

    def _if_it_pays(self, pack: Pack, beside: GateFirstPack, gates: SentGates) -> tuple[Pack, SentGates | None]:
        """Return the pack and thresholds if sparsity is faster. If the pack cannot be made, warn and go on without."""
        try:
            return (beside.open(), gates) if self._pays(pack, beside, gates) else (pack, None)
        except (TpiError, OSError) as error:
            warn(f"sparsity is off: its gate-first pack cannot be made: {error}")
            return pack, None

    def _pays(self, pack: Pack, beside: GateFirstPack, gates: SentGates) -> bool:
        """Measure both layouts in turn; return True if the gate-first pack is faster, else warn with the times."""
        if not isinstance(self.kernels, GatedKernels):
            return False
        plain = next(block.shape for block in pack.walk() if block.kind == "ffn")
        self.kernels.set_threads(own_threads(self.options))
        skipped = [one.skipped for one in gates.thresholds.layers]
        found = compare_layouts(self.kernels, pack.config, (plain, beside.shape()), self.nodes, skipped)
        if found.gated < found.plain:
            return True
        warn(_declined(found, gates))
        return False


def is_gate_first(pack: Pack) -> bool:
    """Return True if a pack stores its gates separately."""
    return any(block.shape.gate_first for block in pack.blocks.values())


def _declined(found: Compared, gates: SentGates) -> str:
    return (
        f"sparsity is off, it does not pay here: a token's feed-forward blocks take {1e3 * found.plain:.2f} ms with "
        f"all neurons and {1e3 * found.gated:.2f} ms gate first, without the {gates.thresholds.skipped:.0%} that may "
        f"be left out at --sparsity-error {gates.thresholds.error:g}"
    )
