"""A tiny model's directory, and a cache that the tests of a module share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models import TinyModel


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], TinyModel]) -> str:
    return str(tiny_model("llama").directory)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")
