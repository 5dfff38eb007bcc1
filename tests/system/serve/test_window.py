"""The page's view of the memory window, for a model that does not fit, on two nodes, during an answer."""

from pathlib import Path
from time import monotonic

import pytest

from tests.support.browser import DESKTOP, MISSING, Browser
from tests.support.started import serving
from tpi.config import default_cache
from tpi.pack.library.pull import pull

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

MEMORY = "48MiB"
SHOWN = (
    "[...document.querySelectorAll('.card')].map((card) => card.innerText.match(/(\\d+) of (\\d+) blocks read ahead/))"
)
PLACES = """
    return [...document.querySelectorAll(".card")].map((card) => {
      const figure = [...card.querySelectorAll(".figure")].find((one) => one.innerText.includes("blocks read ahead"));
      return figure?.querySelector(".track i").style.left;
    });
"""


def test_the_window_fills_and_slides_on_each_node(window: Browser, tmp_path: Path) -> None:
    gguf = str(pull("smollm2-135m", default_cache()))
    with serving(tmp_path, "-m", gguf, "--local", "1", "-c", "512", "--memory", MEMORY) as http:
        window.size(*DESKTOP)
        window.open(str(http.base_url))
        body = {"prompt": "Once", "max_tokens": 480, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body):  # until we leave
            window.wait(f"{SHOWN}.length === 2 && {SHOWN}.every(Boolean)")
            seen: list[set[str]] = [set(), set()]
            deadline = monotonic() + 120
            while any(len(places) < 4 for places in seen):  # it slides on both
                assert monotonic() < deadline, f"the windows were seen at {seen} alone"
                for places, place in zip(seen, window.run(PLACES), strict=True):
                    places.add(place)
                window.run("return new Promise((resolve) => setTimeout(resolve, 50))")
        ready, blocks = map(int, window.run(f"return {SHOWN}[0].slice(1)"))
        assert 0 <= ready <= blocks
