"""A child process of `master.confined` that compiles and renders any chat template."""

from collections.abc import Callable, Mapping
from typing import Any

from master.text.templates.renderer import open_work as open_template


def open_work(settings: Mapping[str, Any]) -> Callable[[str], dict[str, Any]]:
    """Return a function that compiles a template's source and renders the messages of `settings` with it."""

    def render(source: str) -> dict[str, Any]:
        template = open_template({"source": source, "special": {"eos_token": "</s>"}})
        return template({"messages": settings["messages"], "names": {}, "answers": [], "first_answer": 0xF0000})

    return render
