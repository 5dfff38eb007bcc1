"""Output of commands: answers on stdout as they come; progress and notes on stderr."""

import re
import sys
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path

from master.generation.answer import Answer, AnswerLimits, answer
from master.generation.thread import EngineThread
from master.reporting.figures import RunFigures
from master.text.tokenizer import Tokenizer
from master.vocabulary.sampler import Sampler
from tpi.errors import TpiError
from tpi.progress import line_begun, warn
from tpi.system.streams import unfiltered

_STYLES_AT_END = re.compile(r"(\x1b\[[\d;]*m)+$")


def write(text: str) -> None:
    """Write `text` to stdout at once and unfiltered. At a terminal it must have passed `tpi.text.harmless`.

    Raises:
        BrokenPipeError: if the reader is gone.
        TpiError: if the text cannot be written, for example because the disk is full.
    """
    if sys.stdout is None:
        return
    stdout = unfiltered(sys.stdout)
    try:
        stdout.write(text)
        stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TpiError(f"cannot write the answer to standard output: {error.strerror}; send it elsewhere") from error
    if text and at_terminal():
        line_begun(not _STYLES_AT_END.sub("", text).endswith("\n"))


def at_terminal() -> bool:
    """Return True if stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def stream_answer(
    figures: RunFigures,
    tokenizer: Tokenizer,
    engine: EngineThread,
    tokens: SequenceOf[int],
    sampler: Sampler,
    limits: AnswerLimits,
    show: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
    begun: SequenceOf[int] = (),
) -> Answer:
    """Generate one answer and pass its text to `show` as it comes; show the progress of its prompt on stderr.

    Arguments and errors are those of `master.generation.answer.answer`.
    """
    with figures.prompt_progress() as watch:
        try:
            mark = figures.mark
            return answer(engine, tokenizer, tokens, sampler, limits, show, mark, stopped, begun, watch)
        finally:
            show("\n")  # after an error too, so that its message gets a line of its own


def write_trace(figures: RunFigures, path: Path | None) -> None:
    """Write the timeline to `path`, if it was asked for, and warn of missing spans."""
    if lacks := figures.write_trace(path):
        warn(lacks)
