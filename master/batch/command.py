"""The command `tpi batch`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from master.generation.engine import MOST_RUNNING
from master.options import RunOptions, placement_options, quiet_option, verbose_option
from master.session import Session
from master.vocabulary.sampler import Sampling
from tpi.flags import ModelCommand
from tpi.paths import FILE

if TYPE_CHECKING:
    from master.batch.answering import BatchCounts
    from master.batch.results import BatchResults
    from master.batch.source import BatchSource
    from tpi.progress import Progress

_MOST = 4096  # limit of requests at once


@click.command(cls=ModelCommand)
@click.argument("source", metavar="FILE.jsonl", type=FILE)
@click.option("-o", "--output", metavar="OUT.jsonl", required=True, type=FILE, help="File to append the answers to.")
@placement_options
@click.option(
    "--alias",
    multiple=True,
    metavar="NAME",
    help="Name of the model in the input (default: its file or directory). May be repeated for more names.",
)
@click.option(
    "--parallel",
    type=click.IntRange(1, _MOST),
    help="Limit of requests at once, if memory allows (default: 64; on an accelerator, the fastest number).",
)
@click.option(
    "--retry", is_flag=True, help="Remove the lines of OUT.jsonl that have an error, and send these requests again."
)
@verbose_option
@quiet_option
def batch(
    source: Path,
    output: Path,
    alias: tuple[str, ...],
    parallel: int | None,
    retry: bool,
    verbose: bool,
    quiet: bool,
    **flags: Any,
) -> int:
    """Answer all requests of a file in OpenAI's batch form: custom_id, method, url and body on each line.

    url is /v1/chat/completions or /v1/completions. Answers are appended in the order in which they are complete; a
    request that cannot be answered gets a line with the reason. To continue after an interruption, run the same command
    again.

    The exit status is 1 if all requests were answered before and some have an error, or if some have an error after
    --retry.
    """
    from master.batch.results import BatchResults  # the imports that only this command needs
    from master.batch.source import BatchSource
    from tpi.progress import warn

    placement = RunOptions.from_flags(flags)
    names = tuple(dict.fromkeys(filter(None, alias))) or (Path(placement.model).name or placement.model,)
    asked = BatchSource(source)
    placement = _for_many(placement, asked, parallel)
    with BatchResults(output, asked, names, warn, retry) as results:
        if left := len(results.answered) < len(asked.lines):
            with _saying_how_far(asked, results, warn):
                _answer(placement, names, asked, results, verbose, quiet)
        elif not quiet:
            click.echo(f"all {len(asked.lines)} requests of {source} are answered in {output} already", err=True)
        if not results.failed:
            return 0
        count = f"{len(results.failed)} of {len(asked.lines)}"
        warn(f"{count} requests have an error in {output} in place of an answer; --retry sends them again")
        return int(retry or not left)


@contextmanager
def _saying_how_far(asked: "BatchSource", results: "BatchResults", warn: Callable[[str], None]) -> Iterator[None]:
    """Call `warn` with the number of answers that are stored already, if the `with` block raises."""
    try:
        yield
    except BaseException:
        done = f"{len(results.answered)} of {len(asked.lines)}"
        warn(f"{done} requests are answered in {results.path}; run the same command to continue")
        raise


def _for_many(placement: RunOptions, asked: "BatchSource", parallel: int | None) -> RunOptions:
    """Return `placement` with settings for the requests of `asked`, so that an accelerator may use micro-batches.

    If it does, the roofline model chooses the number of requests at once, up to `parallel` (None: all of them). See
    docs/batching.md.
    """
    from master.batch.estimate import usual_request

    devices = placement.devices
    return replace(
        placement,
        devices=replace(devices, offload=replace(devices.offload, unattended=True)),
        parallel=parallel or min(MOST_RUNNING, len(asked.lines)),
        streams=min(parallel or MOST_RUNNING, len(asked.lines)),
        batched=parallel or min(_MOST, len(asked.lines)),
        usual=usual_request(asked),
    )


def _answer(
    placement: RunOptions,
    names: Sequence[str],
    asked: "BatchSource",
    results: "BatchResults",
    verbose: bool,
    quiet: bool,
) -> None:
    from master.batch.answering import BatchCounts
    from master.batch.watch import watching
    from master.reporting.output import write_trace
    from master.reporting.report import print_compared, print_nodes

    counts = BatchCounts()
    with Session(placement) as session:
        session.sampler(Sampling.of({}))  # prints the sampling settings of the model's files
        if not quiet:
            click.echo(session.engine.deployment.at_once.words(), err=True)
        began = perf_counter()
        session.figures.mark()
        with watching(f"answering {asked.path.name}", quiet) as progress:
            _run(session, names, asked, results, counts, progress)
        nodes = session.report()
        write_trace(session.figures, session.placement.trace)
        if not quiet:
            summary = _summary(counts, results, perf_counter() - began)
            print_nodes(nodes, summary, stderr=True, table=verbose or len(nodes) > 1)
            if verbose:
                print_compared(session.compared(), stderr=True)


def _run(
    session: Session,
    names: Sequence[str],
    asked: "BatchSource",
    results: "BatchResults",
    counts: "BatchCounts",
    progress: "Progress",
) -> None:
    import asyncio
    from contextlib import closing

    from master.api.answers.service import Service
    from master.batch.answering import BatchAnswering

    with (
        session.answering() as engine,
        closing(Service(engine, session.tokenizer, session.pack.config.vocab, counts)) as service,
    ):
        asyncio.run(BatchAnswering(service, names, asked, results, counts, progress).run())


def _summary(counts: "BatchCounts", results: "BatchResults", seconds: float) -> str:
    refused = f", {counts.refused} of them with an error" if counts.refused else ""
    return (
        f"{counts.answered} requests answered{refused} in {results.path}: {counts.prompt_tokens} prompt tokens, "
        f"{counts.made_tokens} generated, {(counts.prompt_tokens + counts.made_tokens) / seconds:.1f} tok/s together"
    )
