"""The commands `tpi run` and `tpi bench`."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from secrets import token_bytes
from statistics import median
from typing import Any

import click

from master.generation.answer import Answer, AnswerLimits, answer, encode_prompt, prompt_messages
from master.generation.client import Client
from master.generation.thread import EngineThread
from master.options import RunOptions, placement_options, quiet_option, sampling_options, take_sampling, verbose_option
from master.reporting.output import at_terminal, stream_answer, write, write_trace
from master.reporting.prose import AnswerWriter
from master.reporting.report import answer_fields, node_fields, print_choice, print_compared, print_nodes
from master.reporting.spans import Span
from master.session import Session
from master.text.prompts import checked_text, read_prompt
from master.vocabulary.sampler import Sampler, Sampling
from tpi.flags import ModelCommand, model_argument, prompt_argument
from tpi.progress import warn
from tpi.system.interrupts import exit_on_termination
from tpi.system.keyboard import echo_disabled
from tpi.text import json_text


@click.command(cls=ModelCommand)
@model_argument
@prompt_argument
@placement_options
@sampling_options
@click.option(
    "-p", "--prompt", metavar="TEXT", help="The prompt, formatted by the model's chat template; - reads it from stdin."
)
@click.option("-f", "--file", metavar="FILE", help="Take the prompt from FILE; without -p and -f it comes from a pipe.")
@click.option("--system", metavar="TEXT", help="A system message before the prompt.")
@click.option(
    "-n",
    "tokens",
    type=click.IntRange(min=1),
    help="Maximum number of tokens to generate (default: to the end of the answer or of the context).",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text. May be repeated.")
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@verbose_option
@quiet_option
def run(
    prompt: str | None,
    file: str | None,
    system: str | None,
    tokens: int | None,
    stop: tuple[str, ...],
    raw: bool,
    as_json: bool,
    verbose: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Answer one prompt: the answer goes to stdout, everything else to stderr."""
    sampling, placement = take_sampling(flags), RunOptions.from_flags(flags)
    stops = tuple(checked_text(text, "a stop text") for text in stop)
    messages = prompt_messages(read_prompt(prompt, file, raw), system, raw)
    with Session(placement) as session:
        asked = encode_prompt(session.tokenizer, messages, raw)
        session.tokenizer.close()  # frees the memory of the process that renders the chat template
        screen = AnswerWriter()
        show = _nothing if as_json else screen.write
        limits = AnswerLimits(tokens or session.engine.context, stops)
        sampler = session.sampler(sampling)
        # if the output is piped, the keyboard may belong to a pager
        keyboard = _quiet_keyboard() if at_terminal() else nullcontext()
        with keyboard, session.answering() as engine:
            result = stream_answer(session.figures, session.tokenizer, engine, asked, sampler, limits, show)
        nodes = session.report()
        write_trace(session.figures, session.placement.trace)
        if as_json:
            write(_json(answer_fields(result) | session.figures.fields() | {"nodes": node_fields(nodes)}))
        elif not quiet:
            print_nodes(nodes, _summary(result, session), stderr=True, table=verbose or len(nodes) > 1)
            if verbose:
                print_compared(session.compared(), stderr=True)
        if result.finish_reason == "length":
            warn(_cut(tokens, len(asked) + len(result.token_ids), session))


@click.command(cls=ModelCommand)
@model_argument
@placement_options
@click.option(
    "--prompt-tokens", default=128, show_default=True, type=click.IntRange(min=1), help="Length of the prompt."
)
@click.option(
    "--gen-tokens", default=64, show_default=True, type=click.IntRange(min=2), help="Tokens to generate after it."
)
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(min=1), help="How often to measure.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@quiet_option
def bench(prompt_tokens: int, gen_tokens: int, repeat: int, as_json: bool, quiet: bool, **flags: Any) -> None:
    """Measure the speed of prefill (pp) and decode (tg): medians over the repeats, and mean figures of each node.

    Also measure decode with drafts, if the model supports drafts. Show the measurements behind the choice of the
    collective, and the layouts from which the stages were chosen.
    """
    placement = RunOptions.from_flags(flags)
    with Session(placement) as session:
        prompt = [1 + index % (session.pack.config.vocab - 1) for index in range(prompt_tokens)]
        limits = AnswerLimits(gen_tokens, ignore_eos=True)
        with session.answering() as engine:
            _measure(session, engine, prompt, AnswerLimits(2, ignore_eos=True))  # warm up
            measured = [_measure(session, engine, prompt, limits) for _ in range(repeat)]
            times = repeat if session.engine.deployment.drafts else 0
            drafting = [_measure(session, engine, prompt, limits, drafts=True)[0] for _ in range(times)]
        results, nodes = [result for result, _ in measured], session.figures.report([span for _, span in measured])
        write_trace(session.figures, session.placement.trace)
        if as_json:
            compared = session.compared()
            write(
                _json(
                    _medians(results)
                    | _with_drafts(drafting)
                    | session.figures.fields()
                    | {"layouts": compared.fields() if compared else None, "nodes": node_fields(nodes)}
                )
            )
        else:
            figures = _medians(results)
            summary = (
                f"pp{prompt_tokens} {figures['prefill_tokens_per_s']:.1f} tok/s, "
                f"tg{gen_tokens} {figures['decode_tokens_per_s']:.1f} tok/s, "
                f"{_told(drafting)}medians of {repeat}"
            )
            print_nodes(nodes, summary)
            if choice := session.figures.fields()["choice"]:
                print_choice(choice)
            print_compared(session.compared())


def _measure(
    session: Session, engine: EngineThread, prompt: list[int], limits: AnswerLimits, drafts: bool = False
) -> tuple[Answer, Span]:
    """Generate one answer without the prefix cache; return it, and the nodes' totals before and after its decoding.

    With `drafts`, steps also run drafted tokens, if the deployment allows drafts.
    """
    session.engine.drafts = drafts
    greedy, alone = Sampler(Sampling(temperature=0)), Client(salt=token_bytes(8))
    mark = session.figures.mark
    result = answer(engine, session.tokenizer, prompt, greedy, limits, mark=mark, client=alone)
    return result, engine.call(session.figures.span).result()


def _with_drafts(results: list[Answer]) -> dict[str, Any]:
    if not results:
        return {}
    return {
        "decode_tokens_per_s_with_drafts": median(result.decode_rate for result in results),
        "drafted_tokens": sum(result.drafts.made for result in results),
        "accepted_tokens": sum(result.drafts.right for result in results),
    }


def _told(results: list[Answer]) -> str:
    if not results:
        return ""
    figures = _with_drafts(results)
    right = f"{figures['accepted_tokens']} of {figures['drafted_tokens']} right"
    return f"{figures['decode_tokens_per_s_with_drafts']:.1f} tok/s with drafts ({right}), "


def _medians(results: list[Answer]) -> dict[str, Any]:
    return {
        "prompt_tokens": results[0].prompt_tokens,
        "completion_tokens": len(results[0].token_ids),
        "ttft_s": median(result.ttft for result in results),
        "prefill_tokens_per_s": median(result.prefill_rate for result in results),
        "decode_tokens_per_s": median(result.decode_rate for result in results),
        "repeat": len(results),
    }


def _json(fields: dict[str, Any]) -> str:
    return json_text(fields) + "\n"


def _cut(limit: int | None, used: int, session: Session) -> str:
    """Return a sentence with the reason why an answer was cut, and the flag that allows a longer answer."""
    context, longest = session.engine.context, session.pack.config.context
    if used < context:
        return f"the answer was cut at -n {limit}: give a larger -n, or leave -n out"
    more = f"a larger -c allows more, up to {longest}" if longest > context else "the model was made for no more"
    return f"the answer was cut where the context of {context} tokens ends: {more}"


@contextmanager
def _quiet_keyboard() -> Iterator[None]:
    """Turn off the echo of keys that are typed within the block; the next program at the terminal gets them.

    The terminal is restored even after SIGTERM and SIGHUP.
    """
    with exit_on_termination(), echo_disabled(lines=True):
        yield


def _nothing(text: str) -> None:
    """Do nothing with the text, because with --json it is part of the object."""


def _drafts(result: Answer) -> str:
    drafts = result.drafts
    return f" ({drafts.right} of {drafts.made} drafted tokens right)" if drafts.made else ""


def _summary(result: Answer, session: Session) -> str:
    return (
        f"{result.prompt_tokens} prompt tokens, first token after {result.ttft:.2f} s; "
        f"{len(result.token_ids)} tokens at {result.decode_rate:.1f} tok/s{_drafts(result)}; "
        f"{session.figures.describe()}"
    )
