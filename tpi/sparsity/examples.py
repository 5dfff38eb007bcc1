"""Training examples of predictors: the inputs of a model's feed-forward blocks over a text, and its active neurons.

For 16k tokens of a 7B model they would take 13 GiB as computed. Therefore two files hold the inputs as float16 and the
activity as bits. Memory holds the examples of one piece of the text while they are collected, and those of one
layer while its predictor is trained. An interrupted collection continues from the files.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tpi.config import SPARSE
from tpi.errors import ModelError
from tpi.kernels import Kernels
from tpi.pack.reader import Pack
from tpi.progress import Progress, silent
from tpi.sparsity.replay import F32, I32, FfnWeights, dense, replay
from tpi.sparsity.usage import U8, pack_bits
from tpi.system.atomic import write_atomically
from tpi.system.fulldisk import write_error
from tpi.system.private import make_private, private

Active = npt.NDArray[np.bool_]

SEQUENCES = 8  # sequences that are replayed together
_DONE, _INPUTS, _ACTIVE = "done.json", "inputs.f16", "active.bits"
ROWS = 1024  # tokens that are unpacked at a time
_LARGEST_F16 = np.float32(np.finfo(np.float16).max)


@dataclass(frozen=True, eq=False)
class LayerExamples:
    """Training examples for the predictor of one layer, one for each of `len(self)` tokens.

    Attributes:
        inputs: `[tokens, hidden]` float16 or float32, the input of the feed-forward block `ahead` layers earlier.
        bits: `[tokens, bytes]` uint8, the active neurons of this layer, packed by `tpi.sparsity.usage.pack_bits`.
    """

    layer: int
    inputs: npt.NDArray[Any]
    bits: U8
    neurons: int
    ahead: int = 0

    @classmethod
    def of(cls, layer: int, x: F32, active: Active, ahead: int = 0) -> "LayerExamples":
        """Create examples from the inputs `x` `[tokens, hidden]` and the activity `active` `[tokens, neurons]`.

        `x` is from the feed-forward block `ahead` layers earlier.
        """
        return cls(layer, x, pack_bits(active), active.shape[1], ahead)

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def hidden(self) -> int:
        """Number of values of one input."""
        return int(self.inputs.shape[1])

    def rows(self, at: npt.NDArray[np.int64] | slice) -> tuple[F32, Active]:
        """Return the inputs and activity of the tokens `at`: float32 `[tokens, hidden]`, bool `[tokens, neurons]`."""
        active = np.unpackbits(self.bits[at], axis=1, count=self.neurons, bitorder="little")
        return np.asarray(self.inputs[at], np.float32), active.view(np.bool_)

    def pieces(self) -> Iterator[tuple[F32, Active]]:
        """Yield the inputs and activity of all tokens, `ROWS` tokens at a time."""
        for first in range(0, len(self), ROWS):
            yield self.rows(slice(first, first + ROWS))

    def part(self, first: int, last: int) -> "LayerExamples":
        """Return the examples of the tokens `[first, last)`."""
        return replace(self, inputs=self.inputs[first:last], bits=self.bits[first:last])


@dataclass(frozen=True)
class ExampleFiles:
    """Examples in files in the directory `folder`; `of` identifies the pack and the text."""

    folder: Path
    of: str

    def collect(
        self, pack: Pack, tokens: I32, kernels: Kernels, ahead: int = 0, progress: Progress = silent
    ) -> dict[int, LayerExamples]:
        """Return the examples of every layer over `tokens`, memory-mapped from files.

        The inputs of a layer are those of the feed-forward block `ahead` layers earlier. Examples that an earlier call
        wrote for the same pack and text are not collected again. `progress` receives the number of finished sequences
        and of all sequences.

        Raises:
            ModelError: if the activations of this model are never 0, or if it has experts.
            WeightsError: if the files cannot be written.
        """
        layers, hidden, width = _shape(pack)
        shapes = (layers, tokens.size, hidden), (layers, tokens.size, width)
        try:
            done = self._begun((2 * math.prod(shapes[0]), math.prod(shapes[1])))
            progress(done, len(tokens))
            while done < len(tokens):
                self._add(pack, tokens, done, kernels)
                done = min(done + SEQUENCES, len(tokens))
                write_atomically(self.folder / _DONE, json.dumps({"of": self.of, "sequences": done}).encode())
                progress(done, len(tokens))
        except OSError as error:
            raise write_error(self.folder, error, "free some disk, or use fewer --tokens") from error
        inputs = np.memmap(self.folder / _INPUTS, np.float16, "r", shape=shapes[0])
        bits = np.memmap(self.folder / _ACTIVE, np.uint8, "r", shape=shapes[1])
        return _paired(inputs, bits, pack.config.intermediate, ahead)

    @property
    def nbytes(self) -> int:
        """Bytes that the files take on disk."""
        return sum(512 * path.stat().st_blocks for path in self.folder.glob("*"))

    def remove(self) -> None:
        """Remove both files of the examples."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _begun(self, sizes: tuple[int, int]) -> int:
        """Return the number of sequences already collected.

        Files of `sizes` bytes are created first if there are none, if those found belong to another text or pack, or if
        they are incomplete.
        """
        files = (self.folder / _INPUTS, self.folder / _ACTIVE)
        try:
            found = json.loads((self.folder / _DONE).read_text())
            if found["of"] == self.of and tuple(file.stat().st_size for file in files) == sizes:
                return int(found["sequences"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # there is nothing to continue from
        self.remove()
        make_private(self.folder)
        for path, size in zip(files, sizes, strict=True):
            with open(path, "wb", opener=private) as file:
                file.truncate(size)
        return 0

    def _add(self, pack: Pack, tokens: I32, first: int, kernels: Kernels) -> None:
        """Write the examples of all layers for the `SEQUENCES` sequences from number `first` on."""
        if pack.config.activation not in SPARSE:
            raise ModelError(
                f"{pack.path} has {pack.config.activation} activations, which are never 0; give a model with ReLU"
            )
        with (self.folder / _INPUTS).open("r+b") as inputs, (self.folder / _ACTIVE).open("r+b") as bits:

            def see(layer: int, weights: FfnWeights, x: F32) -> F32:
                halves = np.clip(x, -_LARGEST_F16, _LARGEST_F16).astype(np.float16)
                for file, rows in ((inputs, halves), (bits, pack_bits(weights.active(x)))):
                    file.seek((layer * tokens.size + first * tokens.shape[1]) * rows[0].nbytes)
                    file.write(rows.tobytes())
                return dense(layer, weights, x)

            replay(pack, tokens[first : first + SEQUENCES], kernels, see)


def token_bytes(pack: Pack) -> int:
    """Return the bytes on disk that `ExampleFiles` takes for each token of a text."""
    layers, hidden, width = _shape(pack)
    return layers * (2 * hidden + width)


def _shape(pack: Pack) -> tuple[int, int, int]:
    """Return the number of layers, the values of an input, and the bytes of a token's activity in one layer."""
    return pack.config.layers, pack.config.hidden, -(-pack.config.intermediate // 8)


def _paired(inputs: npt.NDArray[Any], bits: U8, neurons: int, ahead: int) -> dict[int, LayerExamples]:
    """Return each layer's examples: its own activity, and the inputs of the layer `ahead` layers before it.

    Where there is no such layer, the inputs are those of layer 0.
    """
    paired = {}
    for layer, active in enumerate(bits):
        far = min(ahead, layer)
        paired[layer] = LayerExamples(layer, inputs[layer - far], active, neurons, far)
    return paired
