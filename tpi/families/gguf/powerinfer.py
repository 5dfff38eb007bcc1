"""PowerInfer's files (`*.powerinfer.gguf`): GGUF by another magic, with what its engine needs of a sparse model.

`blk.N.ffn_down_t` is the transpose of what other files call `ffn_down`; the activation is ReLU, of gate and up where
the architecture is Bamboo; `blk.N.fc1` and `blk.N.fc2` are a predictor's two matrices, without biases; and
`powerinfer.sparse_threshold` is the score from which it names a neuron. `blk.N.gpu_idx` marks those that its solver
puts on a GPU, in the file or in a split file that its engine writes beside it; `gpu_bucket` lists the same ones. Read
from its converters and its loader (github.com/SJTU-IPADS/PowerInfer: convert.py, llama.cpp, export_split.py).
"""

from dataclasses import replace
from pathlib import Path

from tpi.config import SPARSE, ModelConfig
from tpi.errors import ModelError
from tpi.families.base import BlockRefs, Family, Model, PredictorRefs, map_tensors, number
from tpi.sources.gguf import GgufSource

DOWN = "blk.{i}.ffn_down_t.weight"
THRESHOLD = "powerinfer.sparse_threshold"
PREDICTORS = ("blk.*.fc1.weight", "blk.*.fc2.weight")
MARKS = "blk.{i}.gpu_idx"
_MARKS = ("blk.*.gpu_idx", "blk.*.gpu_bucket")
_SPLIT = ".generated.gpuidx"  # after the name of the model's file


def rectified(config: ModelConfig) -> ModelConfig:
    """The configuration with ReLU, unless the architecture has an activation of that kind itself."""
    return config if config.activation in SPARSE else replace(config, activation="relu")


def for_powerinfer(config: ModelConfig, family: Family, source: GgufSource) -> Model:
    """The model of one of PowerInfer's files.

    Raises:
        ModelError: if a layer has half a predictor, or the threshold is no number.
    """
    names = family.gguf_names
    assert names is not None
    names = replace(names, ffn={**names.ffn, "down": DOWN})
    has = source.tensors.__contains__
    model = family.gguf_arranged(map_tensors(config, names, has, interleaved=family.interleaved), has)
    return replace(
        model,
        layers=tuple(tuple(map(_turned, blocks)) for blocks in model.layers),
        predictors=_predictors(config, source),
        marks=_marks(config, source),
        accounted=(*model.accounted, *PREDICTORS, *_MARKS),
    )


def _turned(block: BlockRefs) -> BlockRefs:
    """With the columns of down in the rows of its tensor."""
    if block.kind != "ffn":
        return block
    return replace(
        block, parts=tuple((name, replace(ref, turned=True) if name == "down" else ref) for name, ref in block.parts)
    )


def _marks(config: ModelConfig, source: GgufSource) -> Path | None:
    if any(MARKS.format(i=layer) in source.tensors for layer in range(config.layers)):
        return source.path
    split = source.path.with_name(source.path.name + _SPLIT)
    return split if split.is_file() else None


def _predictors(config: ModelConfig, source: GgufSource) -> tuple[PredictorRefs, ...]:
    threshold = number(source.metadata, THRESHOLD, 0.0)
    found = []
    for layer in range(config.layers):
        first, second = (f"blk.{layer}.fc{number}.weight" for number in (1, 2))
        present = [name in source.tensors for name in (first, second)]
        if any(present) and not all(present):
            raise ModelError(f"{source.label} has only one of {first} and {second}; convert the model again")
        if all(present):
            found.append(PredictorRefs(layer, first, second, threshold))
    return tuple(found)
