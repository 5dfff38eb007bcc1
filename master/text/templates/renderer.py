"""The rendering of one chat template, in the child process of `master.confined`."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2.exceptions import TemplateError

from master.text.templates.provenance import ANSWER, Text, as_text, from_caller, marks_of, own
from master.text.templates.sandbox import OUTPUT_CHARS, Sandbox

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that the server itself sets; templates make control tokens of them."""
_HALVES = re.compile("[\ud800-\udfff]")
_RUN = re.compile(rb"\x00+|\x01+|\x02+")


def open_work(settings: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Compile the template `settings["source"]`; return a function that renders it.

    The texts in `settings["special"]` count as written by the template. If the request is `names_read`, the function
    returns the names that the template reads instead of a rendering.

    Raises:
        Exception: the error of compiling, of any type.
    """
    sandbox, source = Sandbox(), settings["source"]
    template = sandbox.compiled(source)
    special = {name: own(text) for name, text in settings["special"].items()}

    def render(asked: Mapping[str, Any]) -> dict[str, Any]:
        if asked.get("names_read"):
            return {"names_read": sorted(sandbox.names_read(source))}
        names = {"add_generation_prompt": True, **from_caller(asked["names"]), **special}
        answers = {index: chr(asked["first_answer"] + index) for index in asked["answers"]}
        messages = [_message(message, answers.get(index)) for index, message in enumerate(asked["messages"])]
        rendered = as_text(template.render({**names, "messages": messages}))
        if len(rendered) > OUTPUT_CHARS:
            raise TemplateError(f"it writes more than {OUTPUT_CHARS} characters")
        if _HALVES.search(rendered):
            raise TemplateError("it writes half a character (a lone surrogate)")
        runs = [(found.end() - found.start(), found[0][0]) for found in _RUN.finditer(marks_of(rendered))]
        return {"text": str.__str__(rendered), "runs": runs}

    return render


def _message(message: Mapping[str, Any], answer: str | None) -> dict[str, Any]:
    """Return a message with its marks.

    If the message is an earlier answer, the character `answer` takes the place of its content; else `answer` is None.
    """
    role = message.get("role")
    known = {"role": own(role)} if role in ROLES else {}
    if answer is not None:
        return {**known, "content": Text(answer, ANSWER)}
    return {**from_caller(dict(message)), **known}
