"""The page in several tabs of one browser: they share what is stored, and no tab loses another tab's changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.browser import DESKTOP, ENTER, KEY, MISSING, MODEL, Browser

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

LONG = "Write a very long story about a lighthouse."
LIVE, OVER = "document.querySelector('.live .text')?.innerText.length", "!document.querySelector('.live')"
TITLES = "[...document.querySelectorAll('#conversations .open')].map((one) => one.textContent)"
ASKED = "[...document.querySelectorAll('.mine .body')].map((one) => one.innerText)"

_STORES = """
const { Store } = await import("/page/store.js");
class Kept extends Map {  // a Storage with room for so many characters
  constructor(room = Infinity) { super(); this.room = room; }
  get length() { return this.size; }
  key(place) { return [...this.keys()][place] ?? null; }
  getItem(name) { return this.get(name) ?? null; }
  removeItem(name) { this.delete(name); }
  setItem(name, text) {
    const others = [...this].filter(([key]) => key !== name).reduce((sum, [, value]) => sum + value.length, 0);
    if (others + text.length > this.room) throw new Error("full");
    this.set(name, text);
  }
}
const add = (chat, text) => chat.messages.push({ role: "user", content: text });
const say = (store, text) => { add(store.chat, text); store.save(); };
const all = (store) => store.chats.map((chat) => chat.messages.map((one) => one.content).join(" "));
"""

_RANDOM = """
function lost(seed) {
  let state = seed;
  const draw = (count) => (state = (state * 48271) % 2147483647) % count;
  const kept = new Kept(), tabs = [new Store(kept), new Store(kept)], busy = [null, null];
  const answered = (tab) => busy[tab] ?? tabs[tab].chat;
  for (let step = 0; step < 60; step += 1) {
    const tab = draw(2), store = tabs[tab], chat = answered(tab);
    switch (draw(5)) {
      case 0: busy[tab] = chat; break; // an answer is under way there, whatever is shown
      case 1: add(chat, `s${step}.`); store.save(chat); busy[tab] = null; break;
      case 2: store.begin(); break;
      case 3: store.show(store.chats[draw(store.chats.length)].id); break;
      default: store.reload([busy[tab]]); // a storage event; there may be none for a while
    }
    if (!store.chats.includes(store.chat)) return `after step ${step} what is shown is not in the list`;
  }
  const last = all(new Store(kept)).join(" ");
  return tabs.flatMap(all).flatMap((text) => text.split(" ")).filter((word) => !last.includes(word)).join();
}
return Array.from({ length: 200 }, (_, seed) => lost((seed + 1) * 7919)).filter((words) => words);
"""


def in_page(window: Browser, url: str, script: str, *arguments: object) -> Any:
    """Return the result of `script`, which may create stores with given storages."""
    window.open(f"{url}/page/icon.svg")
    return window.run(f"return (async function () {{ {_STORES}\n{script} }}).apply(null, arguments)", *arguments)


@contextmanager
def another_tab(page: Browser, url: str) -> Iterator[tuple[str, str]]:
    """Open the same page in a second tab, and show it; return the handles of the first tab and of this one."""
    first = page.tab()
    second = page.open_tab()
    page.open(f"{url}/")
    page.wait(f"document.getElementById('model').textContent === '{MODEL}'")
    try:
        yield first, second
    finally:
        page.show(second)
        page.close_tab(first)


def ask(page: Browser, text: str) -> None:
    page.run("document.getElementById('prompt').focus()")
    page.type(text, ENTER)
    page.wait(f"{LIVE} > 0 || ({OVER} && document.querySelector('.answer .after')?.innerText)")


def stop(page: Browser) -> None:
    page.run("if (document.querySelector('.live')) document.getElementById('send').click()")
    page.wait(OVER)


@pytest.mark.parametrize("page", [DESKTOP], indirect=True)
def test_a_tab_that_answers_loses_nothing_of_another(page: Browser, page_url: str) -> None:
    ask(page, LONG)
    with another_tab(page, page_url) as (first, second):
        page.run("document.getElementById('new').click()")
        ask(page, "What is two plus two?")
        stop(page)
        page.show(first)
        page.wait(f"{TITLES}.length === 2")  # it hears what the other has kept, while it answers
        stop(page)
        assert page.run(f"return {ASKED}") == [LONG]
        page.show(second)
        page.wait(f"{TITLES}.join() === 'What is two plus two?,{LONG}'")
    page.open(f"{page_url}/")
    page.wait(f"{TITLES}.join() === 'What is two plus two?,{LONG}'")
    assert page.complaints() == []


@pytest.mark.parametrize("page", [DESKTOP], indirect=True)
def test_what_another_tab_deletes_is_answered_no_more(page: Browser, page_url: str) -> None:
    ask(page, LONG)
    with another_tab(page, page_url) as (first, _):
        page.run("window.confirm = () => true; document.querySelector('#conversations .remove').click()")
        page.wait(f"{TITLES}.join() === 'New chat'")
        page.show(first)
        page.wait(f"{TITLES}.join() === 'New chat' && {OVER}")
        assert page.run("return document.querySelectorAll('#messages > li').length") == 0
        assert page.run("return Object.keys(localStorage).filter((name) => name.startsWith('tpi.chat'))") == []
    assert page.complaints() == []


@pytest.mark.parametrize("page", [DESKTOP], indirect=True)
def test_settings_of_one_tab_are_those_of_the_other(page: Browser, page_url: str) -> None:
    change = "const field = document.getElementById(arguments[0]); field.value = arguments[1];"
    change += "field.dispatchEvent(new Event('change'))"
    with another_tab(page, page_url) as (first, _):
        page.run(change, "system", "Be brief.")
        page.show(first)
        page.wait("document.getElementById('system').value === 'Be brief.'")
        page.run(change, "temperature", "0.5")
    page.open(f"{page_url}/")
    shown = "['key', 'system', 'temperature'].map((id) => document.getElementById(id).value)"
    page.wait(f"{shown}.join() === '{KEY},Be brief.,0.5'")


def test_whatever_two_tabs_do_nothing_is_lost(window: Browser, page_url: str) -> None:
    assert in_page(window, page_url, _RANDOM) == []


def test_both_sides_of_one_conversation_are_kept(window: Browser, page_url: str) -> None:
    script = """
        const kept = new Kept(), one = new Store(kept);
        say(one, "a");
        const other = new Store(kept), answered = one.chat;
        say(other, "b");
        add(answered, "c");
        one.reload([answered]);
        one.save(answered);
        other.reload();
        return [all(one), all(other).toSorted(), all(new Store(kept)).toSorted(), one.chat === answered];
    """
    listed, elsewhere, kept, shown = in_page(window, page_url, script)
    assert sorted(listed) == elsewhere == kept == ["a b", "a c"]
    assert shown


def test_what_was_deleted_stays_deleted(window: Browser, page_url: str) -> None:
    script = """
        const kept = new Kept(), one = new Store(kept);
        say(one, "a");
        const other = new Store(kept), answered = one.chat;
        other.remove(other.chat.id);
        add(answered, "b");
        one.save(answered);
        one.reload([answered]);
        return [all(one), all(new Store(kept)), one.chat === answered];
    """
    assert in_page(window, page_url, script) == [[""], [""], False]


def test_what_earlier_versions_kept_is_found(window: Browser, page_url: str) -> None:
    script = """
        const chat = (id) => ({ id, title: id, messages: [{ role: "user", content: id }] });
        const kept = new Kept();
        kept.set("tpi.chats", JSON.stringify([chat("b"), null, { id: "c" }, chat("a")]));
        kept.set("tpi.shown", '"a"');
        const store = new Store(kept);
        say(store, "more");
        return [all(store), all(new Store(kept)), [...kept.keys()].toSorted()];
    """
    names = ["tpi.chat.a", "tpi.chat.b", "tpi.shown"]
    assert in_page(window, page_url, script) == [["b", "a more"], ["b", "a more"], names]


def test_without_room_the_oldest_goes_and_the_shown_one_stays(window: Browser, page_url: str) -> None:
    script = """
        const kept = new Kept(700), store = new Store(kept);
        for (const word of ["a", "b", "c", "d", "e", "f"]) {
          store.begin().begun = word.charCodeAt(0);
          say(store, word.repeat(50));
        }
        const full = new Store(new Kept(0));
        say(full, "x");
        full.reload();
        full.set("key", "k");
        full.set("system", "s");
        return [all(store), all(new Store(kept)), all(full), full.settings.key];
    """
    here, kept, full, key = in_page(window, page_url, script)
    assert here == kept
    assert "f" * 50 in kept
    assert "a" * 50 not in kept
    assert full == ["x"]
    assert key == "k"
