"""The page as people use it, in a headless Chromium: SmolLM2 on three local nodes."""

import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browser import ENTER, ESCAPE, MISSING, SHIFT, TAB, Browser, chromium
from tests.support.commands import TPI, clean
from tpi.config import default_cache
from tpi.pack.library.pull import pull

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

KEY, MODEL = "house", "smollm2-135m"
LONG = "Write a very long story about a lighthouse."
PHONE, DESKTOP = (390, 844), (1280, 800)
LIVE = "document.querySelector('.live .text')?.innerText.length"
OVER = "!document.querySelector('.live')"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    gguf, folder = pull(MODEL, default_cache()), tmp_path_factory.mktemp("serve")
    command = [*TPI, "serve", "-m", str(gguf), "--local", "2", "--port", "0", "--alias", MODEL, "-c", "2048"]
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=clean(folder, {"TPI_API_KEY": KEY})
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
def page(request: pytest.FixtureRequest, window: Browser, url: str) -> Browser:
    """The page with its key given and no conversation yet."""
    window.size(*request.param)
    window.open(f"{url}/page/icon.svg")  # of the same origin, and does nothing
    window.run("localStorage.clear(); localStorage.setItem('tpi.settings', arguments[0])", f'{{"key": "{KEY}"}}')
    window.open(f"{url}/")
    window.wait(f"document.getElementById('model').textContent === '{MODEL}'")
    window.complaints()
    return window


def test_a_conversation_by_keyboard_alone(page: Browser) -> None:
    tab_to(page, "#prompt")
    page.type(LONG, ENTER)
    page.wait(f"{LIVE} > 20")
    early = page.run(f"return {LIVE}")
    page.wait(f"{LIVE} > {early} + 20")  # it grows while one looks on
    assert page.text("#send") == "Stop"
    tab_to(page, "#send")
    page.type(ENTER)
    page.wait(OVER)
    assert page.text("#send") == "Send"
    assert "stopped" in page.text(".answer .after")
    stopped = page.text(".answer .text")

    tab_to(page, ".mine .tools button:nth-child(2)")  # edit
    page.type(ENTER)
    page.wait("document.activeElement.matches('.edit textarea')")
    page.run("document.activeElement.select()")
    page.type("Say hello.", SHIFT + ENTER, "Be brief.", ENTER)
    page.wait(f"document.querySelector('.answer .after')?.innerText.includes('tokens/s') && {OVER}")
    assert page.text(".mine .body") == "Say hello.\nBe brief."
    assert page.text(".answer .text") not in ("", stopped)

    tab_to(page, ".answer > .tools button:nth-child(2)")  # retry
    page.type(ENTER)
    page.wait(f"{OVER} && document.querySelectorAll('#messages > li').length === 2")
    page.wait("document.querySelector('.answer .after').innerText.includes('tokens/s')")
    assert "tokens/s" in page.text("#speed")
    assert page.complaints() == []


def test_an_edit_can_be_given_up(page: Browser) -> None:
    ask(page, "Hello")
    tab_to(page, ".mine .tools button:nth-child(2)")
    page.type(ENTER, "more", ESCAPE)
    page.wait("document.activeElement.textContent === 'Edit'")
    assert page.text(".mine .body") == "Hello"
    assert page.complaints() == []


def test_the_house_changes_as_the_model_answers(page: Browser) -> None:
    if page.run("return innerWidth") < 600:
        tab_to(page, "#show-house")
        page.type(ENTER)
    page.wait("document.querySelectorAll('.card').length === 3")
    assert page.run("return [...document.querySelectorAll('.card h3')].map((name) => name.textContent)")[0] == "master"
    assert "0\u20132 of 9" in page.text(".card")
    before = page.run("return [...document.querySelectorAll('.card')].map((card) => card.innerText)")
    page.run(
        "fetch('/v1/completions', {method: 'POST', body: JSON.stringify({prompt: 'Once', max_tokens: 60}),"
        " headers: {'Content-Type': 'application/json', Authorization: 'Bearer ' + arguments[0]}}); return 0",
        KEY,
    )
    shown = "[...document.querySelectorAll('.card')].map((card) => card.innerText)"
    page.wait(f"{shown}.every((text, index) => text !== ({before!r})[index])")
    assert re.search(r"compute \d+\.\d", page.text(".card .legend"))
    assert page.complaints() == []


def test_conversations_stay_in_the_browser(page: Browser, url: str) -> None:
    ask(page, "Hello")
    page.run("document.getElementById('new').click()")
    page.wait("!document.getElementById('empty').hidden")
    ask(page, "What is two plus two?")
    page.open(f"{url}/")
    page.wait("document.querySelectorAll('#messages > li').length === 2")
    assert page.text(".mine .body") == "What is two plus two?"
    page.run("document.querySelectorAll('#conversations .open')[1].click()")
    assert page.text(".mine .body") == "Hello"
    assert page.complaints() == []


def test_nothing_is_wider_than_the_screen_and_all_has_a_name(page: Browser) -> None:
    ask(page, "Hello")
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    nameless = """
        const named = (one) => one.labels?.length || one.getAttribute("aria-label") || one.textContent.trim();
        return [...document.querySelectorAll("button, input, textarea, summary, a")].filter((one) => !named(one)).length
    """
    assert page.run(nameless) == 0
    for theme in ("light", "dark"):
        page.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        assert page.run(_CONTRASTS) == []


def test_a_wrong_key_is_asked_for(window: Browser, url: str) -> None:
    window.size(*DESKTOP)
    window.open(f"{url}/page/icon.svg")
    window.run("localStorage.clear()")
    window.open(f"{url}/")
    window.wait("document.activeElement.id === 'key'")
    assert "key" in window.text("#notice")
    window.type(KEY, TAB)
    window.wait(f"document.getElementById('model').textContent === '{MODEL}'")
    window.wait("document.getElementById('notice').hidden")


HOSTILE = [
    "<img src=x onerror=window.hit=1>", "<script>hit=1</script>", "```html\n<script>hit=1</script>\n```",
    "[a](javascript:window.hit=1)", "[a](data:text/html,x)", "[x](JaVaScRiPt:alert)", "![x](http://127.0.0.1:1/x.png)",
    "| <b>a</b> | b |\n|---|---|\n| <i>c</i> | d |", "https://x.example/\"onclick=hit=1", "> <iframe src=/>",
]  # fmt: skip


def test_what_a_model_writes_is_text(page: Browser) -> None:
    for text in HOSTILE:
        html, tags, links = page.run(_RENDERED, text)
        assert not set(tags) & {"IMG", "SCRIPT", "IFRAME", "B", "I"}, html
        assert all(re.match("https?://", link) for link in links), html
    assert page.run("return window.hit ?? null") is None
    assert page.complaints() == []


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a **b** *c* `d*e*`", "<p>a <strong>b</strong> <em>c</em> <code>d*e*</code></p>"),
        ("# T\ntext", "<h3>T</h3><p>text</p>"),
        ("- a\n- b\n  1. c\n\nd", '<ul><li>a</li><li>b<ol start="1"><li>c</li></ol></li></ul><p>d</p>'),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("a_b_c \\*d\\* 2 * 3 * 4", "<p>a_b_c *d* 2 * 3 * 4</p>"),
        ("---", "<hr>"),
        ("a & <b>", "<p>a &amp; &lt;b&gt;</p>"),
    ],
)
def test_markdown(window: Browser, url: str, text: str, html: str) -> None:
    window.open(f"{url}/page/index.html")
    assert window.run(_RENDERED, text)[0] == html


def test_markdown_that_grows_is_what_it_is_at_once(window: Browser, url: str) -> None:
    window.open(f"{url}/page/index.html")
    text = "Hi *there*\n\n1. one\n   ```py\n   x = 1\n   ```\n2. two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```\nend"
    assert window.run(_GROWN, text) == window.run(_RENDERED, text)[0]


def ask(page: Browser, text: str) -> None:
    """Ask, and stop the answer once it is there, or wait for its end."""
    page.run("document.getElementById('prompt').focus()")
    page.type(text, ENTER)
    page.wait(f"{LIVE} > 0 || document.querySelector('.answer .after')?.innerText")
    page.run("if (document.querySelector('.live')) document.getElementById('send').click()")
    page.wait(OVER)


def tab_to(page: Browser, css: str) -> None:
    """By the tab key alone."""
    for _ in range(80):
        if page.run("return document.activeElement.matches(arguments[0])", css):
            return
        page.type(TAB)
    raise AssertionError(f"no tab key leads to {css}")


_RENDERED: Any = """
    return import("/page/markdown.js").then(({ render }) => {
      const made = document.createElement("div");
      render(made, arguments[0]);
      const all = [...made.querySelectorAll("*")];
      return [made.innerHTML, all.map((one) => one.tagName), all.filter((one) => one.href).map((one) => one.href)];
    });
"""
_GROWN = """
    return import("/page/markdown.js").then(({ render }) => {
      const made = document.createElement("div");
      for (let end = 1; end <= arguments[0].length; end += 1) render(made, arguments[0].slice(0, end));
      return made.innerHTML;
    });
"""
_CONTRASTS = """
    const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (channel) => (channel /= 255) <= 0.04045 ? channel / 12.92 : ((channel + 0.055) / 1.055) ** 2.4;
    const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
    const behind = (one) => {
      for (; one; one = one.parentElement) {
        const colour = parts(getComputedStyle(one).backgroundColor);
        if (colour.length < 4 || colour[3] > 0) return colour;
      }
    };
    const has = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    return [...document.querySelectorAll("body *")].filter((one) => has(one) && one.checkVisibility()).filter((one) => {
      const [a, b] = [parts(getComputedStyle(one).color), behind(one)].map(luminance);
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5;
    }).map((one) => one.outerHTML.slice(0, 80));
"""
"""Texts whose contrast is under 4.5 to 1 (WCAG 2.2, 1.4.3)."""
