"""What the server counts, for Prometheus.

The only file that imports prometheus_client. Labels name the model or a memory that is loaded,
never what a client wrote.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from knn_moe.serve.answering import Answering
    from knn_moe.serve.engine import Engine

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Metrics:
    """The counters of one server.

    Args:
        engine: Whose jobs and memories are told.
        model: The name of the model without a memory.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineMetrics(engine, model))
        self._requests = self._counter("requests", "Requests that have ended.", "reason")
        self._refused = Counter(
            "knn_moe_refused_requests",
            "Requests that were refused, by HTTP status.",
            ["status"],
            registry=self._registry,
        )
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._generated = self._counter("generated_tokens", "Tokens that were generated.")
        self._waited = self._histogram("queue_seconds", "Time in the queue.")
        self._first = self._histogram("time_to_first_token_seconds", "Time to the first token.")
        self._whole = self._histogram("request_seconds", "Time of whole requests.")
        self._explained = self._histogram("explanation_seconds", "Time of explanations.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"knn_moe_{name}", text, ["model", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"knn_moe_{name}", text, ["model"], registry=self._registry, buckets=_SECONDS
        )

    def on_begin(self, answering: Answering, seconds: float) -> None:
        """An answer left the queue."""
        self._waited.labels(answering.asked.model).observe(seconds)

    def on_first_token(self, answering: Answering, seconds: float) -> None:
        """The first token of a request came."""
        self._first.labels(answering.asked.model).observe(seconds)

    def on_end(self, answering: Answering, reason: str, seconds: float) -> None:
        """A request has ended: answered, failed, too late, or abandoned by its client."""
        model = answering.asked.model
        self._requests.labels(model, reason).inc()
        self._prompt.labels(model).inc(answering.prompt_tokens)
        self._generated.labels(model).inc(answering.completion_tokens)
        self._whole.labels(model).observe(seconds)

    def on_explained(self, model: str, seconds: float) -> None:
        """An explanation was made in this time, waiting included."""
        self._explained.labels(model).observe(seconds)

    def on_refused(self, status: int) -> None:
        """A request was refused."""
        self._refused.labels(str(status)).inc()

    def render(self) -> bytes:
        """Return all numbers in Prometheus' form."""
        return generate_latest(self._registry)


class _EngineMetrics(Collector):
    """What the engine counts itself, read when it is asked for."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterable[Metric]:
        running, waiting = self._engine.counts()
        yield GaugeMetricFamily("knn_moe_running_answers", "Answers in generation.", running)
        yield GaugeMetricFamily("knn_moe_waiting_answers", "Answers that wait.", waiting)
        calls = CounterMetricFamily(
            "knn_moe_routed_tokens", "Tokens that a memory routed, in all layers.", labels=["model"]
        )
        confidence = GaugeMetricFamily(
            "knn_moe_mean_confidence", "Mean λ since the memory was loaded.", labels=["model"]
        )
        rerouted = GaugeMetricFamily(
            "knn_moe_rerouted_share",
            "Share of tokens whose experts a memory changed, since it was loaded.",
            labels=["model"],
        )
        for name, layers in self._engine.stats().items():
            tokens = sum(layer.tokens for layer in layers.values())
            calls.add_metric([name], tokens)
            if not tokens:
                continue
            sums = sum(layer.mean_confidence * layer.tokens for layer in layers.values())
            confidence.add_metric([name], sums / tokens)
            shares = [
                layer.changed * layer.tokens
                for layer in layers.values()
                if layer.changed is not None
            ]
            if len(shares) == len(layers):
                rerouted.add_metric([name], sum(shares) / tokens)
        yield from (calls, confidence, rerouted)
