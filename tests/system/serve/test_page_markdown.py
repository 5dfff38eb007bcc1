"""A model's text as the page shows it: Markdown only."""

import re

import pytest

from tests.support.browser import MISSING, Browser

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(bool(MISSING), reason=MISSING)]


_RENDERED = """
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

HOSTILE = [
    "<img src=x onerror=window.hit=1>", "<script>hit=1</script>", "```html\n<script>hit=1</script>\n```",
    "[a](javascript:window.hit=1)", "[a](data:text/html,x)", "[x](JaVaScRiPt:alert)", "![x](http://127.0.0.1:1/x.png)",
    "| <b>a</b> | b |\n|---|---|\n| <i>c</i> | d |", "https://x.example/\"onclick=hit=1", "> <iframe src=/>",
]  # fmt: skip


def test_what_a_model_writes_is_text(page: Browser) -> None:
    window = page
    for text in HOSTILE:
        html, tags, links = window.run(_RENDERED, text)
        assert not set(tags) & {"IMG", "SCRIPT", "IFRAME", "B", "I"}, html
        assert all(re.match("https?://", link) for link in links), html
    assert window.run("return window.hit ?? null") is None
    assert window.complaints() == []


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
def test_markdown(window: Browser, page_url: str, text: str, html: str) -> None:
    window.open(f"{page_url}/page/index.html")
    assert window.run(_RENDERED, text)[0] == html


def test_markdown_that_grows_is_what_it_is_at_once(window: Browser, page_url: str) -> None:
    window.open(f"{page_url}/page/index.html")
    text = "Hi *there*\n\n1. one\n   ```py\n   x = 1\n   ```\n2. two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```\nend"
    assert window.run(_GROWN, text) == window.run(_RENDERED, text)[0]


_LINKS = """
    return import("/page/markdown.js").then(({ render }) => {
      const made = document.createElement("div");
      render(made, arguments[0]);
      document.body.append(made);  // what is read is what is laid out
      const links = [...made.querySelectorAll("a")].map((one) => one.href);
      const said = [made.innerText, links, made.querySelectorAll("a a, img").length];
      made.remove();
      return said;
    });
"""

NO_LINKS = {
    "a scheme of scripts": "[a](javascript:alert(1))",
    "a tab within the scheme": "[a](java\tscript:alert)",
    "a tab within the scheme of the web": "[a](ht\ttps://x.example)",
    "a scheme in entities": "[a](&#106;avascript:alert)",
    "an encoded scheme": "[a](%6aavascript:alert)",
    "data": "[a](data:text/html;base64,PHM+)",
    "a file": "[a](file:///etc/passwd)",
    "a view of the source": "[a](view-source:https://x.example)",
    "a blob": "[a](blob:https://x.example/1)",
    "no scheme": "[a](//evil.example)",
    "a user before the host": "[a](https://bank.example@evil.example)",
    "a user and a password": "https://bank.example:x@evil.example/",
    "an empty user": "https://@evil.example/",
    "an encoded slash in a user": "https://bank.example%2f@evil.example/",
    "a backslash": "[a](https://bank.example\\@evil.example)",
    "backslashes": "[a](https:\\\\evil.example)",
    "three slashes": "[a](https:///evil.example)",
    "a mark that turns the direction": "[a](https://x.example/\u202egpj.exe)",
    "an isolate": "https://x.example/\u2066a",
    "an encoded mark": "[a](https://x.example/%E2%80%AEgpj.exe)",
    "an encoded mark beside broken bytes": "[a](https://x.example/%FF%E2%80%AEgpj.exe)",
    "an encoded mark in small letters": "https://x.example/%e2%80%8fa",
    "a zero": "[a](https://x.example/\x00a)",
    "an encoded zero": "https://x.example/%00",
    "an encoded end of line": "[a](https://x.example/%0d%0aSet-Cookie:a)",
    "an invisible letter": "https://bank\u200b.example",
    "a soft hyphen": "[a](https://ba\u00adnk.example)",
    "a tag character": "[a](https://x.example/\U000e0041)",
    "a variation selector": "https://x.example/\ufe0f",
    "a Hangul filler": "[a](https://x.example/\u3164)",
    "a wide slash in the host": "https://bank.example\uff0fevil.example",
    "no host": "[a](https://)",
    "a broken port": "[a](https://x.example:99999/)",
    "a reference": "[a][b]\n\n[b]: javascript:alert",
    "a letter to nobody": "[a](mailto:)",
}

LINKS = {
    "words": ("[the docs](https://x.example/a)", "https://x.example/a", "the docs"),
    "a sentence": ("[See it. It's (so) good!](https://x.example/)", "https://x.example/", "See it. It's (so) good!"),
    "itself": ("https://x.example/a?b=c%20d", "https://x.example/a?b=c%20d", "https://x.example/a?b=c%20d"),
    "letters of its own": ("https://x.example/\u00fc", "https://x.example/%C3%BC", "https://x.example/\u00fc"),
    "the end of a sentence": ("Go to https://x.example/a.", "https://x.example/a", "Go to https://x.example/a."),
    "between marks": ("<https://x.example/>", "https://x.example/", "<https://x.example/>"),
    "its host": ("[x.example](https://x.example/a)", "https://x.example/a", "x.example"),
    "its host in capitals": ("[HTTPS://X.EXAMPLE](https://x.example/)", "https://x.example/", "HTTPS://X.EXAMPLE"),
    "another host": ("[bank.example](https://evil.example/)", "https://evil.example/", "bank.example (evil.example)"),
    "another address": (
        "[https://bank.example/](https://evil.example/)", "https://evil.example/",
        "https://bank.example/ (evil.example)",
    ),
    "an address in words": (
        "[go to www.bank.example now](https://evil.example/)", "https://evil.example/",
        "go to www.bank.example now (evil.example)",
    ),
    "an address in bold": (
        "[**bank**.example](https://evil.example/)", "https://evil.example/", "bank.example (evil.example)",
    ),
    "an address in code": (
        "[`bank.example`](https://evil.example/)", "https://evil.example/", "bank.example (evil.example)",
    ),
    "an address by other dots": (
        "[bank\u3002example](https://evil.example/)", "https://evil.example/", "bank\u3002example (evil.example)",
    ),
    "an address by a letter like a dot": (
        "[bank\ua4f8example](https://evil.example/)", "https://evil.example/", "bank\ua4f8example (evil.example)",
    ),
    "an address by invisible letters": (
        "[bank\u200b.\u200bexample](https://evil.example/)", "https://evil.example/",
        "bank\u200b.\u200bexample (evil.example)",
    ),
    "a part of the host": (
        "[bank.example](https://bank.example.evil.example/)", "https://bank.example.evil.example/",
        "bank.example (bank.example.evil.example)",
    ),
    "a user in the label": (
        "[https://bank.example@evil.example](https://evil.example/)", "https://evil.example/",
        "https://bank.example@evil.example (evil.example)",
    ),
    "another path": (
        "[x.example/good](https://x.example/evil)", "https://x.example/evil", "x.example/good (x.example/evil)",
    ),
    "another port": ("[x.example:80](http://x.example:81/)", "http://x.example:81/", "x.example:80 (x.example:81)"),
    "an address of numbers": ("[10.0.0.1](http://10.0.0.2/)", "http://10.0.0.2/", "10.0.0.1 (10.0.0.2)"),
    "a number for an address": ("http://2130706433/", "http://127.0.0.1/", "http://2130706433/ (127.0.0.1)"),
    "letters of another script": (
        "https://b\u0430nk.example/", "https://xn--bnk-6cd.example/",
        "https://b\u0430nk.example/ (xn--bnk-6cd.example)",
    ),
    "punycode": ("[a](https://xn--bnk-6cd.example/)", "https://xn--bnk-6cd.example/", "a"),
    "an encoded dot": (
        "https://bank%2eexample/", "https://bank.example/", "https://bank%2eexample/ (bank.example)",
    ),
    "a wide dot": (
        "https://bank\uff0eevil.example/", "https://bank.evil.example/",
        "https://bank\uff0eevil.example/ (bank.evil.example)",
    ),
    "an address within a label": (
        "[https://bank.example/ here](https://evil.example/)", "https://evil.example/",
        "https://bank.example/ here (evil.example)",
    ),
    "a letter": ("[write](mailto:a@x.example)", "mailto:a@x.example", "write"),
    "a letter to another": (
        "[a@bank.example](mailto:a@evil.example?cc=b)", "mailto:a@evil.example?cc=b", "a@bank.example (a@evil.example)",
    ),
    "a picture": ("![a.png](https://x.example/a.png)", "https://x.example/a.png", "!a.png (x.example)"),
    "an address by a comma": (
        "[bank,example](https://evil.example/)", "https://evil.example/", "bank,example (evil.example)",
    ),
    "the beginning of an address": (
        "[bank](https://evil.example/).example", "https://evil.example/", "bank (evil.example).example",
    ),
    "the beginning in bold": (
        "**[bank](https://evil.example/)**__.example", "https://evil.example/", "bank (evil.example)__.example",
    ),
    "the end of an address": (
        "(bank.[example](https://evil.example/))", "https://evil.example/", "(bank.example (evil.example))",
    ),
    "the middle of an address": (
        "- **bank**[.](https://evil.example/)example", "https://evil.example/", "bank. (evil.example)example",
    ),
    "words in a sentence": (
        '("[the docs, please](https://x.example/).") Now', "https://x.example/", '("the docs, please.") Now',
    ),
    "in a heading": ("# [bank.example](https://evil.example)", "https://evil.example/", "bank.example (evil.example)"),
}  # fmt: skip


def test_addresses_that_cannot_be_judged_stay_text(window: Browser, page_url: str) -> None:
    window.open(f"{page_url}/page/index.html")
    for case, text in NO_LINKS.items():
        said, links, _ = window.run(_LINKS, text)
        assert links == [], case
        assert not set("\u202e\u2066\x00") & set(said), case


def test_links_show_where_they_lead(window: Browser, page_url: str) -> None:
    window.open(f"{page_url}/page/index.html")
    for case, (text, href, shown) in LINKS.items():
        assert window.run(_LINKS, text) == [shown, [href], 0], case
    long = window.run(_LINKS, f"[a.b](https://{'a.' * 100}example/)")[0]
    assert len(long) < 150
    assert long.endswith("a.example)")


def test_a_label_does_not_turn_the_direction_of_what_follows(window: Browser, page_url: str) -> None:
    window.open(f"{page_url}/page/index.html")
    html = window.run(_RENDERED, "[\u202emoc.knab](https://evil.example/)")[0]
    assert 'dir="auto"' in html
    assert '<bdi class="leads" dir="ltr">(evil.example)</bdi>' in html
