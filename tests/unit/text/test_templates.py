"""Chat templates: Hugging Face's helpers work, and whatever a template does ends soon, small, and in one sentence."""

from pathlib import Path

import pytest

from master.text.templates import template as module
from master.text.templates.template import ChatTemplate
from tpi.errors import ModelError

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: list[dict[str, str]] = HELLO) -> str:
    return ChatTemplate(source, "tiny").render(messages, bos_token="<s>", eos_token="</s>")


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
}


@pytest.mark.parametrize("source", USED_BY_MODELS)
def test_what_models_use_works(source: str) -> None:
    assert render(source) == USED_BY_MODELS[source]


ATTACKS = (
    "{{ range(10**9) | list }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ ['aaaa'] * 10**9 }}",
    "{{ 2 ** (10**9) }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "{% set ns = namespace(x=3) %}{% for i in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ 'a'.expandtabs(10**9) }}",
    "{{ (1).to_bytes(10**9, 'big') }}",
    "{{ 'a' | center(10**9) }}",
    "{{ ['a'] | tojson(indent=10**9) }}",
    "{{ 'a\n' | indent(10**9) }}",
    "{{ ['a'] | batch(10**9, 'b') | list }}",
    "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) }}",
    "{% set x = 'a' * 1000000 %}{{ x.join(x) }}",
    "{% set x = 'a' * 1000000 %}{{ range(100000) | map('replace', '1', x) | list }}",
    "{{ lipsum(n=10**6) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{% for m in messages %}{{ m.content }",
    "{{ messages[7].content.upper() }}",
    "{{ 1 // 0 }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{{ raise_exception('no system messages,\n \x1b[2Jplease') }}",
    "x" * (1 << 21),
)


@pytest.mark.parametrize("source", ATTACKS, ids=range(len(ATTACKS)))
@pytest.mark.timeout(30)
def test_whatever_a_template_does_is_one_sentence(source: str) -> None:
    with pytest.raises(ModelError, match="the chat template of tiny failed: ") as caught:
        render(source)
    said = str(caught.value)
    assert said.endswith("; tpi run --raw does without it")
    assert said.isprintable()
    assert len(said) < 400


LOOPS = (
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% set x = range(100000) | sum %}{% endfor %}",
    "{{ range(100000) | map('string') | map('length') | sum }}" * 1000,
)


@pytest.mark.parametrize("source", LOOPS, ids=range(len(LOOPS)))
def test_time_is_limited(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.05)
    with pytest.raises(ModelError, match=r"it takes longer than 0\.05 s"):
        render(source)


def test_a_template_renders_again_after_a_failure() -> None:
    template = ChatTemplate("{{ messages[0].content * 3000000 }}", "tiny")
    with pytest.raises(ModelError):
        template.render([{"role": "user", "content": "long"}])
    for _ in range(4):  # what was written is counted per rendering
        assert len(template.render([{"role": "user", "content": "a"}])) == 3000000


def test_real_templates_render(tmp_path: Path) -> None:
    """The tiny models' own."""
    from tests.support.models import TEMPLATE

    assert render(TEMPLATE) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
