"""Packs that are planned but never written, for models too large to make on this machine."""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from benchmarks.memory.seventy import RandomSource
from tpi.config import Format, ModelConfig
from tpi.families.huggingface.reader import from_huggingface
from tpi.pack.blockfile import HASH_BYTES, BlockShape
from tpi.pack.builder.plan import plan_pack
from tpi.pack.reader import F32, Bytes, Pack, PackBlock


class UnwrittenBlock(PackBlock):
    """A block whose hashes and vectors are zeros."""

    def __init__(self, name: str, shape: BlockShape) -> None:
        super().__init__(Path(name), sha256(f"{name} {shape}".encode()).hexdigest(), shape)

    def unit_hashes(self, run: str) -> Bytes:
        """Return zeros as the hashes of the block's units."""
        return np.zeros((self.run(run).units, HASH_BYTES), np.uint8)

    def vectors(self) -> dict[str, F32]:
        """Return the block's vectors."""
        return {name: np.zeros(length, np.float32) for name, length in self.shape.vectors}


class UnwrittenPack(Pack):
    """Blocks of a Llama shape (keys of a Hugging Face config.json), packed as `dtype`, for planning only."""

    def __init__(self, shape: Mapping[str, object], dtype: Format) -> None:
        layer = {**shape, "num_hidden_layers": 1}
        source = RandomSource(layer)
        model = from_huggingface(layer, source.tensors.__contains__, source.label)
        plan, layers = plan_pack(model, source, dtype), int(str(shape["num_hidden_layers"]))
        self._config, self._format = replace(model.config, layers=layers), dtype
        self.layers = tuple(
            tuple(UnwrittenBlock(f"{number} {block.kind}", block.shape) for block in plan.layers[0])
            for number in range(layers)
        )
        self.embedding = UnwrittenBlock("embedding", plan.embedding.shape)
        self.head = UnwrittenBlock("head", plan.head.shape)
        self.per_layer = ()

    @property
    def config(self) -> ModelConfig:
        """Model configuration."""
        return self._config

    @property
    def format(self) -> Format:
        """Pack format."""
        return self._format
