"""A node's trace as messages, page by page."""

from tpi.net.questions import AskSpans, Spans
from tpi.trace import NoTrace, clock


def pack_spans(ask: AskSpans, trace: NoTrace) -> Spans:
    """The node's clock now, and the spans that were asked for."""
    names, rows = trace.page(ask.first, ask.count)
    return Spans(ask.session, ask.epoch, clock(), trace.dropped, names, rows)
