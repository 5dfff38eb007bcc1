"""The last layers of some GGUF files, which predict further tokens (MTP); the model is run without them."""

from dataclasses import replace

from tpi.errors import ModelError
from tpi.families.base import Fields, Model, int_field, size_field

_MOST = 4  # layers of this kind that a model may have


def main_layers(fields: Fields) -> int:
    """Return the number of layers, not counting the layers for prediction.

    Raises:
        ModelError: if no other layer is left, or if there are more than 4 layers for prediction.
    """
    every, ahead = size_field(fields, "block_count"), int_field(fields, "nextn_predict_layers", 0)
    if not 0 <= ahead < min(every, _MOST + 1):
        most = min(every - 1, _MOST)
        raise ModelError(f"nextn_predict_layers is {ahead} for {every} layers; a number from 0 to {most} is expected")
    return every - ahead


def without_prediction(model: Model) -> Model:
    """Return the model with the tensors of its prediction layers declared unused, so that packing accepts them."""
    last = (f"blk.{model.config.layers + number}.*" for number in range(_MOST))
    return replace(model, ignored_tensors=(*model.ignored_tensors, *last))
