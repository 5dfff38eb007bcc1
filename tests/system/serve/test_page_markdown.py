"""What a model writes, as the page shows it: Markdown, and nothing else."""

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
