"""Fixtures that several test modules share."""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.forking import allow_forks, forked_programs
from tests.support.models import TinyModel, make_model
from tpi.pack.builder.build import open_source, pack_model
from tpi.pack.reader import Pack

# the native link is for Linux
collect_ignore = [] if sys.platform == "linux" else ["unit/testbed/test_testbed_channels.py"]

settings.register_profile("tpi", deadline=None)  # a busy machine fails no test
settings.load_profile("tpi")

# Keys for tests that need one; tests must not use the user's.
_config = tempfile.TemporaryDirectory(prefix="tpi-test-config-")
os.environ["TPI_CONFIG"] = _config.name

# A shell starts what it puts in the background with SIGINT ignored, which the commands under test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that are marked `waits` first, so that other tests can run at the same time."""
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the programs of tests that are marked `bare` as usual, not by a fork."""
    allow_forks(item.get_closest_marker("bare") is None)


@pytest.fixture(scope="session", autouse=True)
def forker() -> Iterator[None]:
    """Start TPI's programs by forks (`tests.support.forking`)."""
    with forked_programs():
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """Return a function that makes each tiny model once in a session, by name."""
    made: dict[str, TinyModel] = {}

    def get(name: str) -> TinyModel:
        if name not in made:
            made[name] = make_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def tiny_pack(tiny_model: Callable[[str], TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pack]:
    """Return a function that makes each pack of a tiny model once in a session, by name and dtype (default: f32)."""
    made: dict[tuple[str, str], Path] = {}

    def get(name: str, dtype: str = "f32") -> Pack:
        if (name, dtype) not in made:
            target = made[name, dtype] = tmp_path_factory.mktemp("packs") / f"{name}-{dtype}"
            pack_model(open_source(tiny_model(name).directory), dtype, target)
        return Pack.open(made[name, dtype])

    return get
