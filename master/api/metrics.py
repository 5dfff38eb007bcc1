"""Prometheus metrics under the names that vLLM gave them, so that existing dashboards work."""

import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from master.api.answers.events import Ended
from master.generation.thread import EngineThread, Ticket

_MOST_RETRY_S = 60
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)


class ServerMetrics:
    """Counters of a server; `text` is the output of `/metrics`."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._prompt = self._counter("prompt_tokens", "Prompt tokens.")
        self._generated = self._counter("generation_tokens", "Generated tokens.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._first = self._histogram("time_to_first_token_seconds", "Time from a request to its first token.")
        self._between = self._histogram("inter_token_latency_seconds", "Time from one token of an answer to the next.")
        self._whole = self._histogram("e2e_request_latency_seconds", "Time from a request to its end.")
        self._queue = self._histogram("request_queue_time_seconds", "Time from a request to its admission.")
        self._ended = Counter(
            "vllm:request_success", "Requests that ended, by reason.", ("model_name", "finished_reason"),
            registry=self.registry,
        )  # fmt: skip
        self._mean_s = 1.0  # seconds of a request, as a moving average

    def watch(self, engine: EngineThread) -> None:
        """Add gauges of the present state of `engine`."""
        self.registry.register(_Gauges(engine, self._model))

    @property
    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def first_token(self, seconds: float) -> None:
        """Record the time to a request's first token."""
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """Record the time between two tokens."""
        self._between.observe(seconds)

    def over(self, ticket: Ticket, prompt_tokens: int, ended: Ended | None) -> None:
        """Count the end of a request, with its tokens and times."""
        self._ended.labels(self._model, ended.reason if ended else "error").inc()
        if ended is None or ticket.first_admitted is None:
            return
        self._prompt.inc(prompt_tokens)
        self._queries.inc(prompt_tokens)
        self._hits.inc(ended.cached)
        self._generated.inc(ended.completion_tokens)
        self._queue.observe(ticket.first_admitted - ticket.at)
        seconds = ticket.first_admitted - ticket.at + ended.timings.prompt_s + ended.timings.predicted_s
        self._whole.observe(seconds)
        self._mean_s += 0.1 * (seconds - self._mean_s)

    def retry_after(self, engine: EngineThread) -> int:
        """Return the seconds after which a refused client should try again, at most 60.

        About a tenth of the open requests end in this time.
        """
        return min(_MOST_RETRY_S, max(1, math.ceil(self._mean_s * engine.open / engine.engine.admission.most / 10)))

    def _counter(self, name: str, help_: str) -> Counter:
        counter = Counter(f"vllm:{name}", help_, ("model_name",), registry=self.registry)
        return counter.labels(self._model)

    def _histogram(self, name: str, help_: str) -> Histogram:
        histogram = Histogram(f"vllm:{name}", help_, ("model_name",), registry=self.registry, buckets=_SECONDS)
        return histogram.labels(self._model)


class _Gauges(Collector):
    def __init__(self, engine: EngineThread, model: str) -> None:
        self._engine, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        engine = self._engine.engine
        pages, running = engine.deployment.pages, len(engine.admission.running)
        now = {
            "num_requests_running": (running, "Running requests."),
            "num_requests_waiting": (max(0, self._engine.open - running), "Waiting requests."),
            "kv_cache_usage_perc": (1 - pages.free / pages.total, "Share of the pages in use."),
        }
        for name, (value, help_) in now.items():
            family = GaugeMetricFamily(f"vllm:{name}", help_, labels=("model_name",))
            family.add_metric((self._model,), value)
            yield family
        so_far = {
            "num_preemptions": (engine.admission.preempted, "Requests that were preempted."),
            "spec_decode_num_draft_tokens": (engine.speculation.drafted.total(), "Tokens that were drafted."),
            "spec_decode_num_accepted_tokens": (engine.speculation.accepted.total(), "Drafted tokens that were right."),
        }
        for name, (value, help_) in so_far.items():
            counter = CounterMetricFamily(f"vllm:{name}", help_, labels=("model_name",))
            counter.add_metric((self._model,), value)
            yield counter
