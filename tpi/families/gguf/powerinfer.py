"""PowerInfer's files of sparse models (`*.powerinfer.gguf`): GGUF with another magic and with additional tensors.

- `blk.N.ffn_down_t` is the transpose of `ffn_down` in other files.
- `blk.N.fc1` and `blk.N.fc2` are the two matrices of a predictor, without biases.
- `powerinfer.sparse_threshold`, in the metadata, is the score from which a predictor counts a neuron as active.
- `blk.N.gpu_idx` marks the neurons that PowerInfer's solver puts on a GPU, and `gpu_bucket` lists the same neurons.
  They are in the model's file, or in a second file that PowerInfer's engine writes next to it.

The activation is ReLU; in the architecture Bamboo, it is ReLU of both gate and up. All this was read from PowerInfer's
converters and loader (github.com/SJTU-IPADS/PowerInfer: convert.py, llama.cpp, export_split.py).
"""

from dataclasses import replace
from pathlib import Path

from tpi.config import SPARSE, ModelConfig
from tpi.errors import ModelError
from tpi.families.base import BlockRefs, Family, Model, PredictorRefs, float_field, map_tensors
from tpi.sources.gguf import GgufSource

DOWN = "blk.{i}.ffn_down_t.weight"
THRESHOLD = "powerinfer.sparse_threshold"
PREDICTORS = ("blk.*.fc1.weight", "blk.*.fc2.weight")
MARKS = "blk.{i}.gpu_idx"
_MARKS = ("blk.*.gpu_idx", "blk.*.gpu_bucket")
_SPLIT = ".generated.gpuidx"  # after the name of the model's file


def with_relu(config: ModelConfig) -> ModelConfig:
    """Return the configuration with ReLU as its activation, unless it already has a sparse activation."""
    return config if config.activation in SPARSE else replace(config, activation="relu")


def for_powerinfer(config: ModelConfig, family: Family, source: GgufSource) -> Model:
    """Return the model of one of PowerInfer's files.

    Raises:
        ModelError: if a layer has only one matrix of a predictor, or the threshold is not a number.
    """
    names = family.gguf_names
    assert names is not None
    names = replace(names, ffn={**names.ffn, "down": DOWN})
    has = source.tensors.__contains__
    model = family.adapt_gguf_refs(map_tensors(config, names, has, interleaved_rope=family.interleaved_rope), has)
    return replace(
        model,
        layers=tuple(tuple(map(_with_transposed_down, blocks)) for blocks in model.layers),
        predictors=_predictors(config, source),
        gpu_marks_file=_marks_file(config, source),
        ignored_tensors=(*model.ignored_tensors, *PREDICTORS, *_MARKS),
    )


def _with_transposed_down(block: BlockRefs) -> BlockRefs:
    """Return the block with the reference to its down matrix marked as transposed."""
    if block.kind != "ffn":
        return block
    return replace(
        block,
        parts=tuple((name, replace(ref, transposed=True) if name == "down" else ref) for name, ref in block.parts),
    )


def _marks_file(config: ModelConfig, source: GgufSource) -> Path | None:
    if any(MARKS.format(i=layer) in source.tensors for layer in range(config.layers)):
        return source.path
    split = source.path.with_name(source.path.name + _SPLIT)
    return split if split.is_file() else None


def _predictors(config: ModelConfig, source: GgufSource) -> tuple[PredictorRefs, ...]:
    threshold = float_field(source.metadata, THRESHOLD, 0.0)
    found = []
    for layer in range(config.layers):
        first, second = (f"blk.{layer}.fc{number}.weight" for number in (1, 2))
        present = [name in source.tensors for name in (first, second)]
        if any(present) and not all(present):
            raise ModelError(f"{source.label} has only one of {first} and {second}; convert the model again")
        if all(present):
            found.append(PredictorRefs(layer, first, second, threshold))
    return tuple(found)
