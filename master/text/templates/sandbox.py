"""jinja2's immutable sandbox with bounds, and with the helpers that Hugging Face templates expect.

The sandbox keeps a template from the machine; the bounds keep it from the machine's memory, and make every single
operation short.
"""

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from master.text.templates.bounds import VALUE_CHARS, check_call, check_format, check_product, checked, metered, size

SOURCE_CHARS = 1 << 20  # of a template; published ones have up to 30,000
_REMOVED = (
    "center",
    "pprint",
    "urlize",
    "wordwrap",
    "xmlattr",
)  # filters that make much of little


class Sandbox(ImmutableSandboxedEnvironment):
    """Bounds what operators, calls and filters can make, and counts all text that is written."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.written = 0  # characters, in this rendering
        self.finalize = self._write
        self.filters["tojson"] = _to_json
        for name, filter_ in list(self.filters.items()):
            self.filters[name] = _bounded_filter(name, filter_)
        for name in _REMOVED:
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def bounded(self, source: str) -> Any:
        """The template, compiled."""
        if len(source) > SOURCE_CHARS:
            raise TemplateError(f"it is longer than {SOURCE_CHARS} characters")
        return self.from_string(_Intercepted().visit(self.parse(source)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """One of the operators above, unless its result would be too large."""
        size((left, right))
        if operator in ("*", "**"):
            check_product(operator, left, right)
        elif operator == "%" and isinstance(left, str):
            check_format((left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call of a function, a macro, or a method of a value."""
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, (str, bytes, int, float, list, tuple, dict)):
            check_call(getattr(obj, "__name__", ""), (owner, *args, *kwargs.values()))
        return checked(super().call(context, obj, *args, **kwargs))

    @pass_context
    def _write(self, context: Context, value: Any) -> str:
        """What an expression, or a piece of literal text, writes; what is captured and written again counts again."""
        size((value,))
        text = str(value)
        self.written += len(text)
        if self.written > VALUE_CHARS:
            raise TemplateError(f"it writes more than {VALUE_CHARS} characters")
        return text


class _Intercepted(NodeTransformer):
    """Makes `~` a filter and literal text an expression, so that the sandbox sees both."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - named by jinja2
        """`a ~ b` as `[a, b] | join`."""
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "join", [], [], None, None, lineno=node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802 - named by jinja2
        """Text between tags as a string."""
        return nodes.Const(node.data, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is the text."""

    tags = {"generation"}  # noqa: RUF012 - as in jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """What stands between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _bounded_filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """`filter_` with its arguments checked before, and its result after."""

    @wraps(filter_)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = args[1:] if hasattr(filter_, "jinja_pass_arg") else args  # the first is jinja2's own
        check_call(name, (*values, *kwargs.values()))
        return checked(filter_(*(metered(arg) if isinstance(arg, Iterator) else arg for arg in args), **kwargs))

    return call


def _to_json(
    value: Any, indent: int | None = None, ensure_ascii: bool = False, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as Hugging Face's `tojson` writes it: not escaped for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
