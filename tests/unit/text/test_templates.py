"""Chat templates: Hugging Face's helpers work, and a malicious template ends soon, in little memory, with an error."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress

import psutil
import pytest

from master.confined import process
from master.text.templates import template as module
from master.text.templates.template import ChatTemplate
from tests.support.models import TEMPLATE
from tests.support.paths import ROOT
from tpi.errors import ModelError

HELLO = [{"role": "user", "content": "Hello"}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: list[dict[str, str]] = HELLO) -> str:
    with closing(ChatTemplate(source, "tiny", SPECIAL)) as template:
        return template.render(messages, {}).text


USED_BY_MODELS = {
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}\n{% endfor %}": "<s>[user] Hello\n",
    "{{ messages | tojson }}": '[{"role": "user", "content": "Hello"}]',
    "{{ {'a': [1, 'é<']} | tojson(indent=2) }}": '{\n  "a": [\n    1,\n    "é<"\n  ]\n}',
    "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}"
    "{% set ns.n = ns.n + i * 2 %}{% endfor %}{{ ns.n }}": "6",
    "{{ 'a' ~ 1 ~ messages[0]['content'].split('l')[-1] }}": "a1o",
    "{{ ['a', 'b'] | join('; ') }}{{ 'x' * 3 }}{{ '%s-%d' % ('n', 1234567) }}": "a; bxxxn-1234567",
    "{{ messages | map(attribute='content') | join(', ') | replace('l', 'L') | upper }}": "HELLO",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') + f('b') }}": "<a><b>",
    "{% generation %}kept{% endgeneration %}": "kept",
    "{{ '{:>3}'.format('a') }}{{ 2 ** 10 }}{{ nothing }}": "  a1024",
    "{{ 'a\n\nb' | indent(2) }}|{{ 'one tWo' | title }}|{{ '<&' | e }}|{{ 'x' | center(3) }}": (
        "a\n\n  b|One Two|&lt;&amp;| x "
    ),
    "{{ messages | join(', ', attribute='role') }}{{ 5 | string + '!' }}{{ 'a' | safe }}": "user5!a",
}


@pytest.mark.parametrize("source", USED_BY_MODELS)
def test_what_models_use_works(source: str) -> None:
    assert render(source) == USED_BY_MODELS[source]


DOUBLED = (
    "{% set a = namespace(x=[1], y=[1]) %}"
    "{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% set a.y = [a.y, a.y] %}{% endfor %}"
)
TIME, MEMORY = r"it takes longer than 0\.5 s", r"it takes more than 256 MiB of memory"
OVER = {
    DOUBLED + "{{ a.x == a.y }}": TIME,
    DOUBLED + "{{ a.x in [a.y] }}": TIME,
    DOUBLED + "{{ a.x < a.y }}": TIME,
    DOUBLED + "{{ [a.x, a.y] | sort }}": TIME,
    DOUBLED + "{{ [a.x, a.y] | unique | list }}": f"{TIME}|unhashable",
    DOUBLED + "{{ {a.x | tojson: 1} }}": f"{TIME}|{MEMORY}",
    DOUBLED + "{{ '%s' % a.x }}": f"{TIME}|{MEMORY}",
    DOUBLED + "{{ '{}'.format(a.x) }}": f"{TIME}|{MEMORY}",
    DOUBLED + "{{ a.x ~ '' }}": f"{TIME}|{MEMORY}",
    DOUBLED + "{{ a.x | join }}": f"{TIME}|{MEMORY}",
    "{{ 9 ** (9 ** 9) }}": f"{TIME}|{MEMORY}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}": TIME,
    "{{ range(100000) | map('string') | map('length') | sum }}" * 1000: TIME,
    "{{ 'a' * 10**9 }}": MEMORY,
    "{{ 10**9 * 'a' }}": MEMORY,
    "{{ ['aaaa'] * 10**9 }}": MEMORY,
    "{{ '%1000000000d' % 1 }}": MEMORY,
    "{{ 'a\n' | indent(10**9) }}": MEMORY,
    "{{ ['a'] | batch(10**9, 'b') | list }}": MEMORY,
    "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) }}": f"{TIME}|{MEMORY}",
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}": MEMORY,
    "{{ " + " + ".join(["'a'"] * 14_000) + " }}": f"{TIME}|{MEMORY}|recursion",
    "{{ x }}" * 18_000: f"{TIME}|{MEMORY}",
    "x" * (129 << 10): "it is longer than 131072 characters",
    "{{ 'a' * (9 * 1024 * 1024) }}": "it writes more than 8388608 characters",
}


@pytest.mark.parametrize("source", OVER, ids=range(len(OVER)))
@pytest.mark.timeout(120)
def test_time_and_memory_are_limited_whatever_runs(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly = TIME in OVER[source]
    monkeypatch.setattr(module, "SECONDS", 0.5 if slowly else 60)
    with pytest.raises(ModelError, match=OVER[source]):
        render(source)


ATTACKS = (
    "{{ range(10**9) | list }}",
    "{{ (1).to_bytes(10**9, 'big') }}",
    "{{ lipsum(n=10**6) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{% for m in messages %}{{ m.content }",
    "{{ messages[7].content.upper() }}",
    "{{ 1 // 0 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}{{ ''.format.__self__ }}{{ 1 // 0 }}",
    "{{ messages[0].content._marks + 1 }}",
    "{% include '/etc/passwd' %}",
    "{{ raise_exception('no system messages,\n \x1b[2Jplease') }}",
    "{{ '\\ud800' }}",
    "{{ '%c' % 55296 }}",
)


@pytest.mark.parametrize("source", ATTACKS, ids=range(len(ATTACKS)))
@pytest.mark.timeout(60)
def test_whatever_a_template_does_is_one_sentence(source: str) -> None:
    with pytest.raises(ModelError, match="the chat template of tiny failed: ") as caught:
        render(source)
    said = str(caught.value)
    assert said.endswith("; tpi run --raw works without a template")
    assert said.isprintable()
    assert len(said) < 400


def children() -> list[psutil.Process]:
    return psutil.Process().children()


@pytest.fixture
def template() -> Iterator[ChatTemplate]:
    with closing(ChatTemplate("{{ 'a' * messages[0].content | int }}", "tiny")) as template:
        yield template


def test_a_template_renders_again_after_a_failure(template: ChatTemplate) -> None:
    assert template.render([{"role": "user", "content": "1"}], {}).text == "a"
    with pytest.raises(ModelError):
        template.render([{"role": "user", "content": "1" + "0" * 9}], {})
    for _ in range(4):
        assert len(template.render([{"role": "user", "content": "3000000"}], {}).text) == 3000000


@pytest.mark.bare
def test_one_child_renders_until_it_is_closed(template: ChatTemplate) -> None:
    before = set(children())
    assert template.render([{"role": "user", "content": "3"}], {}).text == "aaa"
    (child,) = set(children()) - before
    template.render([{"role": "user", "content": "3"}], {})
    assert set(children()) - before == {child}
    child.send_signal(signal.SIGKILL)  # as the system does where memory is short
    child.wait(60)
    with pytest.raises(ModelError):
        template.render([{"role": "user", "content": "3"}], {})
    assert template.render([{"role": "user", "content": "3"}], {}).text == "aaa"
    template.close()
    assert set(children()) == before


@pytest.mark.bare
def test_the_child_ends_with_its_parent() -> None:
    """The child's standard input ends when the parent does, without a message."""
    code = (
        "import os, psutil; from master.text.templates.template import ChatTemplate; "
        "t = ChatTemplate('x', 'tiny'); t.render([], {}); print(psutil.Process().children()[0].pid, flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(60)


@pytest.mark.bare
def test_what_never_worked_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.2)
    with closing(
        ChatTemplate("{{ messages[0].content and 1 // 0 }}" + DOUBLED + "{{ a.x == a.y }}", "tiny")
    ) as template:
        with pytest.raises(ModelError, match="division"):
            template.render(HELLO, {})
        before = children()
        for _ in range(3):
            with pytest.raises(ModelError, match="longer than"):
                template.render([{"role": "user", "content": ""}], {})
        assert children() == [child for child in before if child.is_running()]


@pytest.mark.bare
def test_a_busy_machine_makes_no_template_hopeless(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(ChatTemplate("{% if messages %}{{ messages[0].content }}{% endif %}", "tiny")) as template:
        before = set(children())
        template.start()
        (child,) = set(children()) - before
        monkeypatch.setattr(process, "_START_S", 0.0)
        monkeypatch.setattr(process, "_LEAST_WALL_S", 0.1)
        monkeypatch.setattr(process, "_WALL", 0.0)
        child.suspend()
        with pytest.raises(ModelError, match="busy: try again"):
            template.render(HELLO, {})
        monkeypatch.undo()
        assert template.render(HELLO, {}).text == "Hello"


def test_a_child_that_cannot_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with closing(ChatTemplate("x", "tiny")) as template:
        template.start()
        with pytest.raises(ModelError, match="a process for it cannot be started: Too many open files"):
            template.render(HELLO, {})


def test_memory_is_watched_where_the_system_does_not_limit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([0, 255 << 20, 257 << 20])
    monkeypatch.setattr(process, "_WATCHED", True)
    monkeypatch.setattr(process._Child, "_resident", lambda child: next(sizes))
    with pytest.raises(ModelError, match=MEMORY):
        render(DOUBLED + "{{ a.x == a.y }}")


def test_real_templates_render() -> None:
    """The templates of the tiny models."""
    assert render(TEMPLATE) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
