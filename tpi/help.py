"""Help texts with options in groups: `--help` shows those that most people need, `--help-all` shows all of them."""

from collections.abc import Iterator

import click

_GROUPS = {
    "Most used": (
        "source", "output", "model", "prompt", "file", "system", "url", "workers", "local", "host", "port",
        "tokens", "temperature", "api_key",
    ),
    "Model and memory": (
        "devices", "link", "machine", "dtype", "context", "memory", "device", "gpu_memory", "split",
    ),
    "Answer": ("stop", "top_p", "seed", "as_json"),
}  # fmt: skip
_EXPERT = frozenset(
    (
        "ahead", "cache", "cache_limit", "collective", "crossover", "keys", "kv", "kv_dtype", "min_p", "patience",
        "pipeline", "raw", "rebalance", "repeat_penalty", "retain", "scheduler", "sparsity", "threads",
        "top_k", "trace", "verify_weights", "weights", "window", "wire",
    )
)  # fmt: skip


class GroupedCommand(click.Command):
    """A click command whose help lists its options in groups, and `--help-all` also those for experts."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters of the command, followed by `--help-all`."""
        return [*super().get_params(ctx), _HELP_ALL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups. Options for experts are written only after `--help-all`."""
        options = (one for one in self.get_params(ctx) if isinstance(one, click.Option))
        shown = {one.name: one.get_help_record(ctx) for one in options}
        records = {name: record for name, record in shown.items() if name is not None and record is not None}
        for title, names in self._groups(records, all_of_them=ctx.meta.get(_ALL, False)):
            with formatter.section(title):
                formatter.write_dl([records[name] for name in names])

    def _groups(self, records: dict[str, tuple[str, str]], all_of_them: bool) -> Iterator[tuple[str, list[str]]]:
        """Yield the title of each group of options that has any, and the names of the options."""
        grouped = {name for names in _GROUPS.values() for name in names} | _EXPERT
        for title, names in _GROUPS.items():
            if found := [name for name in names if name in records]:
                yield title, found
        yield "Other options", [name for name in records if name not in grouped]
        if all_of_them and (expert := [name for name in records if name in _EXPERT]):
            yield "Options for experts", expert


def _show_all(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_ALL = f"{__name__}.all"
_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Show all options, also those for experts, and exit.",
)
