"""The predictors for the nodes: each node gets the rows of its own neurons, as a block without units."""

import shlex
from collections.abc import Mapping, Sequence
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from master.options import RunOptions
from tpi.config import SPARSE, ModelConfig, default_cache
from tpi.errors import UsageError
from tpi.net.messages import BlockPlan, PredictorPlan, VectorPlan
from tpi.pack.blockfile import BlockShape
from tpi.pack.reader import Pack
from tpi.partition import FFN_UNIT, Shard
from tpi.sparsity.files import NAME, load_predictors
from tpi.sparsity.predictor import Predictor
from tpi.sparsity.usage import MARKED, Active, load_marks, load_profile
from tpi.sparsity.usage import NAME as PROFILE

F64 = npt.NDArray[np.float64]


class PredictorSource:
    """A model's predictors by layer, and the vectors of every block made from them, by block id."""

    def __init__(
        self, predictors: Mapping[int, Predictor], frequency: F64 | None = None, marks: Active | None = None
    ) -> None:
        """Create a source of predictor blocks.

        `frequency` is how often each neuron is active, `[layers, neurons]`, if the model was profiled. Otherwise
        `marks` may say which neurons are for an accelerator.
        """
        self._predictors = predictors
        self._known: dict[str, F64 | Active] = {}
        if frequency is not None:
            self._known["frequency"] = frequency
        elif marks is not None:
            self._known["marked"] = marks
        self.vectors: dict[bytes, dict[str, npt.NDArray[np.float32]]] = {}

    def memory_bytes(self, nodes: int) -> int:
        """Return the bytes of predictors that stay in memory, to be sent to the other nodes of a group of `nodes`."""
        return sum(one.nbytes for one in self._predictors.values()) if nodes > 1 else 0

    def plans(self, shard: Shard, first: int) -> tuple[tuple[BlockPlan, ...], tuple[PredictorPlan, ...]]:
        """Return the predictors for the node that has `shard`: their blocks, and a plan for each layer's predictor.

        The plans refer to the blocks by number: the first block has the number `first`.
        """
        blocks: dict[bytes, BlockPlan] = {}
        plans: list[PredictorPlan] = []
        if not len(shard.ffn):
            return (), ()
        for layer, whole in self._predictors.items():
            begin, end = (min(unit * FFN_UNIT, whole.neurons) for unit in (shard.ffn.first, shard.ffn.last))
            one = whole.slice(begin, end)
            block = self._block(one, {name: values[layer, begin:end] for name, values in self._known.items()})
            blocks.setdefault(block.id, block)
            at = first + list(blocks).index(block.id)
            weights = one.first.weights
            plans.append(
                PredictorPlan(layer, at, one.rank, one.neurons, weights, one.input_kind, one.ahead, one.threshold)
            )
        return tuple(blocks.values()), tuple(plans)

    def _block(self, one: Predictor, known: Mapping[str, F64 | Active]) -> BlockPlan:
        vectors = {"first": _as_values(one.first.stored), "second": _as_values(one.second.stored)}
        if one.bias is not None:
            vectors["bias"] = one.bias
        vectors |= {name: values.astype(np.float32) for name, values in known.items()}
        shape = tuple(VectorPlan(name, len(values)) for name, values in vectors.items())
        content = sha256(b"".join(values.tobytes() for values in vectors.values())).digest()
        identity = sha256(b"predictor" + repr(shape).encode() + content).digest()
        self.vectors[identity] = vectors
        return BlockPlan(identity, "ffn", (), shape, content)


def _as_values(stored: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """Return the bytes of a matrix as float32 values, padded with zeros to a multiple of 4; copy only to pad."""
    raw = np.ascontiguousarray(stored).view(np.uint8).reshape(-1)
    more = -len(raw) % 4
    return (np.pad(raw, (0, more)) if more else raw).view(np.float32)


def predictors_for(asked: RunOptions, pack: Pack) -> PredictorSource | None:
    """Return the predictors that `--sparsity` asks for; None if all neurons are computed.

    Raises:
        UsageError: if only active neurons are to be computed, and the model has no predictors or cannot have any.
        ModelError: if the predictors' file is damaged.
    """
    sparsity, model = asked.sparsity, asked.model
    if sparsity == "off":
        return None
    found = load_predictors(pack.path / NAME) if has_records(pack) else {}
    if found:
        config = pack.config
        marks = load_marks(pack.path / MARKED, config.layers, config.intermediate)
        return PredictorSource(found, _frequency(pack), marks)
    if sparsity == "auto":
        return None
    if not has_records(pack):
        raise UsageError(
            f"--sparsity {sparsity}: {model} has activations that are never 0, or experts, and all of its neurons are "
            "computed; leave --sparsity out"
        )
    raise UsageError(
        f"--sparsity {sparsity}: {model} has no predictors of active neurons; make them with: "
        f"tpi profile {_same_pack(asked)} --text FILE --predictors"
    )


def _same_pack(asked: RunOptions) -> str:
    """Return the command-line words that select the same pack in another command, quoted for a shell."""
    words = ["-m", asked.model]
    if asked.dtype != RunOptions.dtype:
        words += ["--dtype", asked.dtype]
    if asked.cache != default_cache():
        words += ["--cache", str(asked.cache)]
    return shlex.join(words)


def _frequency(pack: Pack) -> F64 | None:
    """Return how often each neuron is active, `[layers, neurons]`, or None if the pack has no profile of all
    neurons.
    """
    path = pack.path / PROFILE
    if not path.exists():
        return None
    use = load_profile(path)
    fits = (use.layers, use.neurons) == (pack.config.layers, pack.config.intermediate) and use.tokens
    return use.frequency if fits else None


def has_records(pack: Pack) -> bool:
    """Return True if each neuron's weights are stored together, and its activation may be 0."""
    return are_records(pack.config, [block.shape for layer in pack.layers for block in layer])


def are_records(config: ModelConfig, blocks: Sequence[BlockShape]) -> bool:
    """Return True if `has_records` would be True for a model with `config` and `blocks`."""
    ffn = [block for block in blocks if block.kind != "attention"]
    return config.activation in SPARSE and all(
        block.kind == "ffn" and [run.layout for run in block.runs] == ["record"] for block in ffn
    )
