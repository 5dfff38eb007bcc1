"""Training examples of predictors in memory, for small models."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tpi.kernels import Kernels
from tpi.pack.reader import Pack
from tpi.sparsity.examples import ExampleFiles, LayerExamples
from tpi.sparsity.replay import I32


def examples_of(pack: Pack, tokens: I32, kernels: Kernels, ahead: int = 0) -> dict[int, LayerExamples]:
    """Return the examples of each layer over `tokens` `[sequences, length]`; see `ExampleFiles.collect` for `ahead`."""
    with TemporaryDirectory() as folder:
        found = ExampleFiles(Path(folder, "examples"), "a").collect(pack, tokens, kernels, ahead)
        return {
            layer: replace(one, inputs=np.array(one.inputs), bits=np.array(one.bits)) for layer, one in found.items()
        }
