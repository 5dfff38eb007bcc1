"""The page in a browser, with a server of SmolLM2 on three local nodes, for each module of its tests."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import DESKTOP, KEY, MODEL, PHONE, Browser, chromium
from tests.support.commands import TPI, clean
from tpi.config import default_cache
from tpi.pack.library.pull import pull


@pytest.fixture(scope="session")
def served_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the servers of all modules share, whichever of pytest's processes they run in."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "served"


@pytest.fixture(scope="module")
def page_url(
    request: pytest.FixtureRequest, served_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a server; a module's `FLAGS` are added to its command."""
    gguf, folder = pull(MODEL, default_cache()), tmp_path_factory.mktemp("serve")
    flags = getattr(request.module, "FLAGS", ())
    command = [*TPI, "serve", "-m", str(gguf), "--local", "2", "--port", "0", "--alias", MODEL, "-c", "2048", *flags]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=clean(served_cache, {"TPI_API_KEY": KEY})
        ) as process,
    ):
        assert process.stdout
        line = next((line for line in process.stdout if " is served at " in line), "")
        assert line, (folder / "log").read_text()
        yield re.findall(r"http://[^;\s]+", line)[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(params=[PHONE, DESKTOP], ids=["phone", "desktop"])
def page(request: pytest.FixtureRequest, window: Browser, page_url: str) -> Browser:
    """The page with its key entered and no conversation yet; answers are greedy, so that short answers end."""
    window.size(*request.param)
    window.open(f"{page_url}/page/icon.svg")  # of the same origin, and does nothing
    window.run(
        "localStorage.clear(); localStorage.setItem('tpi.settings', arguments[0])",
        f'{{"key": "{KEY}", "temperature": "0"}}',
    )
    window.open(f"{page_url}/")
    window.wait(f"document.getElementById('model').textContent === '{MODEL}'")
    window.complaints()
    return window
