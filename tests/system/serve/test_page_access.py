"""The accessibility of the page: axe (axe-core, MPL-2.0, of the package axe-core-python) finds nothing serious."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.browser import ENTER, MISSING, Browser

_FOUND = find_spec("axe_core_python")
AXE = Path(_FOUND.origin).with_name("axe.min.js") if _FOUND and _FOUND.origin else None
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.skipif(AXE is None, reason="needs axe-core-python, which has axe.min.js; pip install tpi[test]"),
]
_LOOK = """
    return axe.run(document, {resultTypes: ["violations"]}).then(({violations, passes}) => [
      violations.filter((one) => ["serious", "critical"].includes(one.impact))
        .map((one) => `${one.id}: ${one.nodes.map((node) => node.html).join(" ")}`.slice(0, 500)),
      passes.length,
    ]);
"""


def look(page: Browser, theme: str) -> None:
    page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    serious, passed = page.run(_LOOK)
    assert serious == []
    assert passed > 10  # it has looked at something


def test_axe_finds_nothing_serious(page: Browser) -> None:
    """The empty page, an answer, an edit, each drawer, and the entry of the key; phones use the light theme here."""
    assert AXE
    theme = "light" if page.run("return innerWidth") < 600 else "dark"
    page.run(AXE.read_text())
    look(page, theme)
    page.run("document.getElementById('prompt').focus()")
    page.type("Write `code` and a list.", ENTER)
    page.wait("document.querySelector('.live .text')?.innerText.length > 0 || document.querySelector('.answer .after')")
    page.run("if (document.querySelector('.live')) document.getElementById('send').click()")
    page.wait("!document.querySelector('.live')")
    look(page, theme)
    page.run("document.querySelector('.mine .tools button:nth-child(2)').click()")
    look(page, theme)
    for drawer in ("list", "house"):
        page.run(f"document.getElementById('show-{drawer}').click()")
        page.run("document.getElementById('settings').open = true")
        page.run("return Promise.all(document.getAnimations().map((one) => one.finished)).then(() => 0)")
        look(page, theme)
    page.run("document.getElementById('rekey').click()")
    look(page, theme)
    assert page.complaints() == []


def test_axe_would_find_something(page: Browser) -> None:
    assert AXE
    page.run(AXE.read_text())
    page.run("document.getElementById('prompt').removeAttribute('placeholder')")
    page.run("document.querySelector('label[for=prompt]').remove()")
    assert [line.split(":")[0] for line in page.run(_LOOK)[0]] == ["label"]
