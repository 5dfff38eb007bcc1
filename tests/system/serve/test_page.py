"""The page in a headless Chromium, with SmolLM2 on three local nodes."""

import re

import pytest

from tests.support.browser import DESKTOP, ENTER, ESCAPE, KEY, MISSING, MODEL, PHONE, SHIFT, Browser, tab_to

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

LONG = "Write a very long story about a lighthouse."
LIVE = "document.querySelector('.live .text')?.innerText.length"
OVER = "!document.querySelector('.live')"


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
    page.wait(_IDLE.format(key=KEY))  # the server knows, too

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


def test_conversations_stay_in_the_browser(page: Browser, page_url: str) -> None:
    ask(page, "Hello")
    page.run("document.getElementById('new').click()")
    page.wait("!document.getElementById('empty').hidden")
    ask(page, "What is two plus two?")
    page.open(f"{page_url}/")
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


_SEEN = """
    const seen = document.elementFromPoint(...(({x, y, width, height}) => [x + width / 2, y + height / 2])(
      document.querySelector(arguments[0]).getBoundingClientRect()));
    return Boolean(seen?.closest(arguments[0]));
"""


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_a_key_is_asked_for_until_the_server_takes_it(size: tuple[int, int], window: Browser, page_url: str) -> None:
    window.size(*size)
    window.open(f"{page_url}/page/icon.svg")
    window.run("localStorage.clear()")
    window.open(f"{page_url}/")
    window.wait("document.activeElement.id === 'key'")
    assert window.text("#notice") == "This server needs its API key."
    assert all(window.run(_SEEN, css) for css in ("#notice", "#key"))
    assert window.run("return document.getElementById('ask').hidden")
    for wrong in ("wrong", "schl\u00fcssel", "\u30ad\u30fc"):
        window.type(wrong, ENTER)
        window.wait("document.getElementById('notice').innerText.includes('refuses this API key')")
        assert window.run(_SEEN, "#notice")
        window.run("document.getElementById('notice').innerText = ''")
    window.type(f" {KEY} ", ENTER)
    window.wait(f"document.getElementById('model').textContent === '{MODEL}'")
    window.wait("document.getElementById('notice').hidden && document.getElementById('unlock').hidden")
    window.wait("document.activeElement.id === 'prompt'")
    window.open(f"{page_url}/")
    window.wait(f"document.getElementById('model').textContent === '{MODEL}'")
    assert window.run("return document.getElementById('unlock').hidden")
    window.run("document.getElementById('rekey').click()")
    assert window.run("return document.activeElement.id") == "key"
    window.type(ESCAPE)
    assert window.run("return document.getElementById('unlock').hidden")
    window.complaints()  # of the browser, about the answers 401


def test_a_server_that_did_not_answer_is_asked_again(page: Browser, page_url: str) -> None:
    page.command("Network.enable")
    page.command("Network.setBlockedURLs", urls=["*/v1/models"])
    page.open(f"{page_url}/")
    page.wait("document.getElementById('notice').innerText.includes('does not answer')")
    page.command("Network.setBlockedURLs", urls=[])
    page.wait(f"document.getElementById('model').textContent === '{MODEL}'")
    assert page.run("return document.getElementById('notice').hidden")
    page.complaints()  # of the browser, about what was blocked


def test_what_the_server_refuses_is_said(page: Browser) -> None:
    page.run(
        "const field = document.getElementById('temperature'); field.value = '9';"
        "field.dispatchEvent(new Event('change')); document.getElementById('prompt').focus()"
    )
    page.type("Hello", ENTER)
    page.wait("document.getElementById('notice').innerText.includes('temperature')")
    assert page.text("#messages > li .body") == "Hello"  # it can be edited, and sent again
    assert page.run("return document.querySelectorAll('#messages > li').length") == 1


def ask(page: Browser, text: str) -> None:
    """Send a message, and stop the answer once it has begun, or wait for its end."""
    page.run("document.getElementById('prompt').focus()")
    page.type(text, ENTER)
    page.wait(f"{LIVE} > 0 || document.querySelector('.answer .after')?.innerText")
    page.run("if (document.querySelector('.live')) document.getElementById('send').click()")
    page.wait(OVER)


_IDLE = (
    "fetch('/house', {{headers: {{'x-api-key': '{key}'}}}}).then((got) => got.json())"
    ".then((house) => house.running + house.waiting === 0)"
)
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
