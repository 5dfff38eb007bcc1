"""The conversion of a node's trace to messages, one page at a time."""

from tpi.net.questions import AskSpans, Spans
from tpi.trace import NoTrace, clock


def pack_spans(ask: AskSpans, trace: NoTrace) -> Spans:
    """Return a message with the spans of `trace` that `ask` requests, and the current time of the node's clock."""
    names, rows = trace.page(ask.first, ask.count)
    return Spans(ask.session, ask.epoch, clock(), trace.dropped, names, rows)
