"""jinja2's immutable sandbox with the helpers of Hugging Face's templates, in which all text carries its origin.

The sandbox keeps a template from the machine's files and Python's internals. Limits of time and memory are those of the
process that runs it, see `master.confined`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from secrets import token_hex
from typing import Any

from jinja2 import Environment, nodes, pass_context, pass_environment
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.filters import do_title, make_attrgetter
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.visitor import NodeTransformer

from master.text.templates.provenance import CALLER, Text, agreed, as_text, joined, marks_of, own

SOURCE_CHARS = 128 << 10  # limit of a template in characters; published templates have up to 30,000
OUTPUT_CHARS = 8 << 20  # limit of a rendering in characters


class Sandbox(ImmutableSandboxedEnvironment):
    """A jinja2 environment in which all operations on text keep the marks of `master.text.templates.provenance`."""

    concat = staticmethod(joined)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.finalize = _written
        self.filters |= {"tojson": _to_json, "string": as_text, "safe": as_text, "join": _join, "indent": _indent}
        self.filters |= {"e": _escape, "escape": _escape, "forceescape": _escape, "title": _title}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def compiled(self, source: str) -> Any:
        """Return the compiled template.

        Raises:
            TemplateError: if `source` is too long or not a template; compiling may raise other errors, too.
        """
        if len(source) > SOURCE_CHARS:
            raise TemplateError(f"it is longer than {SOURCE_CHARS} characters")
        return self.from_string(_Literals(self).visit(self.parse(source)))

    def names_read(self, source: str) -> frozenset[str]:
        """Return the names that the template reads and does not set itself.

        Raises:
            TemplateError: if `source` is not a template; parsing may raise other errors, too.
        """
        return frozenset(find_undeclared_variables(self.parse(source)))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a marking version of `form.format` or `form.format_map`; None if `value` is neither."""
        form, name = getattr(value, "__self__", None), getattr(value, "__name__", "")
        if not isinstance(form, str) or name not in ("format", "format_map"):
            return None

        def call(*args: Any, **kwargs: Any) -> Text:
            fields = args[0] if name == "format_map" else kwargs
            return self._formatted(as_text(form), () if name == "format_map" else args, fields)

        return call

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, a macro or a method of a value; formatting methods keep marks."""
        return super().call(context, self.wrap_str_format(obj) or obj, *args, **kwargs)

    def _formatted(self, form: Text, args: Any, kwargs: Mapping[str, Any]) -> Text:
        formatter = SandboxedFormatter(self)

        def parts() -> Iterator[Any]:
            write, unnamed = Text if CALLER in marks_of(form) else own, 0
            for literal, name, spec, conversion in formatter.parse(form):
                yield write(literal)
                if name is None:
                    continue
                if name[:1] in ("", ".", "["):
                    name, unnamed = f"{unnamed}{name}", unnamed + 1
                value = formatter.convert_field(formatter.get_field(name, args, kwargs)[0], conversion)
                number = type(value) in (int, float) and not (spec or "").endswith("c")
                said = formatter.format_field(value, formatter.vformat(spec, args, kwargs)) if spec else value
                yield own(said) if spec and number else said

        return agreed(formatter.vformat(form, args, kwargs), lambda: joined(parts()))


class _Literals(NodeTransformer):
    """A code transformer that marks a template's literal texts as its own and makes `~` keep the marks."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox, self._count = sandbox, 0
        sandbox.extend(joined_all=lambda *parts: joined(parts))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - named by jinja2
        """Return the expression `a ~ b` as a call of a function that keeps the marks."""
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined_all"), node.nodes, [], None, None, lineno=node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802 - named by jinja2
        """Return the text between two tags, marked as the template's."""
        return self._literal(node.data, node.lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802 - named by jinja2
        """Return a string marked as the template's, and any other constant unchanged."""
        return self._literal(node.value, node.lineno) if isinstance(node.value, str) else node

    def _literal(self, value: str, line: int) -> nodes.Node:
        self._count += 1
        name = f"literal_{self._count}"
        self._sandbox.extend(**{name: own(value)})
        return nodes.EnvironmentAttribute(name, lineno=line)


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training; only its contents are used."""

    tags = {"generation"}  # noqa: RUF012 - as in jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context  # keeps jinja2 from evaluating it while compiling
def _written(context: Context, value: Any) -> Text:
    return as_text(value)


@pass_environment
def _join(environment: Environment, value: Any, d: Any = "", attribute: str | int | None = None) -> Text:
    """Return the parts of `value`, or an attribute of each, with `d` between them, as jinja2's filter `join` does."""
    parts = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return as_text(d).join(map(as_text, parts))


def _title(value: Any) -> Text:
    text = as_text(value)
    return text.recased(do_title(str.__str__(text)))


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Text:
    """Return `text` indented as jinja2's filter `indent` does."""
    indention = as_text(width) if isinstance(width, str) else own(" " * width)
    lines = (as_text(text) + own("\n")).splitlines()
    head, *rest = lines
    shown = [head, *(indention + line if line or blank else line for line in rest)]
    return (indention if first else Text()) + own("\n").join(shown)


def _escape(value: Any) -> Text:
    text = as_text(value)
    for character, name in (("&", "&amp;"), (">", "&gt;"), ("<", "&lt;"), ("'", "&#39;"), ('"', "&#34;")):
        text = text.replace(character, own(name))
    return text


def _to_json(
    value: Any, indent: int | None = None, ensure_ascii: bool = False, separators: Any = None, sort_keys: bool = False
) -> Text:
    """Return JSON as Hugging Face's `tojson` writes it: not escaped for HTML."""
    nonce, kept = token_hex(16), list[Text]()

    def held(part: Any) -> Any:
        """Replace each text that the template wrote by a random name, which no text of the caller contains."""
        if isinstance(part, Text) and CALLER * len(part) != marks_of(part):
            kept.append(part)
            return f"{nonce}{len(kept) - 1:08d}"
        if isinstance(part, Mapping):
            return {key: held(one) for key, one in part.items()}
        return [held(one) for one in part] if isinstance(part, (list, tuple)) else part

    said = json.dumps(held(value), indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    first, *rest = said.split(nonce)
    parts = [Text(first)]
    for piece in rest:
        text = kept[int(piece[:8])]
        parts += [joined(_encoded(character, ensure_ascii) for character in text), Text(piece[8:])]
    return joined(parts)


def _encoded(character: str, ensure_ascii: bool) -> Text:
    said = json.dumps(character, ensure_ascii=ensure_ascii)[1:-1]
    return Text(said, marks_of(character) * len(said))


def _raise(message: str) -> None:
    raise TemplateError(str(message))
