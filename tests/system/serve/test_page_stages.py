"""The page of a server whose nodes are in several stages."""

import pytest

from tests.support.browser import DESKTOP, ENTER, KEY, MISSING, Browser, tab_to

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

FLAGS = ("--stages", "3")  # of three nodes
ANSWER = """
for (let stream = 0; stream < 3; stream++)
  fetch('/v1/completions', {method: 'POST', body: JSON.stringify({prompt: 'Once', max_tokens: 150, ignore_eos: true}),
    headers: {'Content-Type': 'application/json', Authorization: 'Bearer ' + arguments[0]}});
"""
NAMES = "[...document.querySelectorAll('.card h3')].map((name) => name.textContent)"


def test_layers_of_each_node_and_steps_in_flight_are_shown(page: Browser) -> None:
    if page.run("return innerWidth") < DESKTOP[0]:
        tab_to(page, "#show-house")
        page.type(ENTER)
    page.wait("document.querySelectorAll('.card').length === 3")
    assert page.run(f"return {NAMES}")[0] == "master, stage 1 of 3"
    assert page.run(f"return {NAMES}")[2].endswith(", stage 3 of 3")
    assert "0\u20139 of 30" in page.text(".card")
    page.wait("document.getElementById('house-line').textContent.includes('0 of 3 steps in flight')")
    page.run(ANSWER, KEY)
    page.wait("/[123] of 3 steps in flight/.test(document.getElementById('house-line').textContent)")
    page.wait("/stages \\d/.test(document.querySelector('.card .legend').innerText)")
    assert page.complaints() == []
