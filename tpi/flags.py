"""Common parts of the commands' flags: types that click lacks, the model argument, and the order in the help."""

import math
from typing import Any

import click
from click.core import ParameterSource

from tpi.errors import UsageError
from tpi.help import GroupedCommand


class FiniteRange(click.FloatRange):
    """A range of finite numbers. `click.FloatRange` accepts NaN, and infinity if a side is open."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; fail with `click.BadParameter` unless it is finite and in the range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class ModelCommand(GroupedCommand):
    """A command about a model, which is named with `-m` or by the first argument. A second argument is the prompt."""

    def invoke(self, ctx: click.Context) -> Any:
        """Call the command with the model and the prompt that the positional arguments name.

        Raises:
            UsageError: if the command line names no model, two models, or two prompts.
        """
        words = [word for name in ("named", "asked") if (word := ctx.params.pop(name, None)) is not None]
        takes_prompt = "prompt" in ctx.params
        if words and (ctx.params["model"] is None or len(words) > takes_prompt):
            self._name(ctx, "model", words.pop(0), "-m")
        if words and (takes_prompt or words[0] != ctx.params["model"]):
            self._name(ctx, "prompt" if takes_prompt else "model", words.pop(0), "-p" if takes_prompt else "-m")
        if ctx.params["model"] is None and "url" not in ctx.params:
            raise UsageError(f"say which model: {ctx.command_path} MODEL, or -m MODEL; smollm2-135m is a small one")
        return super().invoke(ctx)

    def _name(self, ctx: click.Context, name: str, word: str, flag: str) -> None:
        """Set the parameter `name` to `word`; raise UsageError if its flag was given with another value."""
        given = ctx.params[name]
        if given not in (None, word):
            raise UsageError(f"the {name} is given twice, as {word!r} and with {flag} {given!r}; give it only once")
        ctx.params[name] = word
        ctx.set_parameter_source(name, ParameterSource.COMMANDLINE)


model_argument = click.argument("named", metavar="[MODEL]", required=False)
prompt_argument = click.argument("asked", metavar="[PROMPT]", required=False)
