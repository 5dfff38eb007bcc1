"""SmolLM2-135M, downloaded and packed in f32 once for all tests here, also with several pytest processes."""

import os
from pathlib import Path

import pytest

from tpi.config import default_cache
from tpi.pack.library.locate import open_model
from tpi.pack.library.pull import pull
from tpi.pack.reader import Pack


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The model's file."""
    return pull("smollm2-135m", default_cache())


@pytest.fixture(scope="session")
def cache(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the model packed in f32."""
    base = tmp_path_factory.getbasetemp()
    cache = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "smollm2"
    open_model(str(gguf), "f32", cache)
    return cache


@pytest.fixture(scope="session")
def pack(gguf: Path, cache: Path) -> Pack:
    """The model in f32."""
    return open_model(str(gguf), "f32", cache)
