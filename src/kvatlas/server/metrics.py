"""What Prometheus reads: the engine's counters as they are when it asks, and how long requests took."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kvatlas.service import Service

#: Seconds, from a short answer of a small model to thinking for many minutes.
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class _State(Collector):
    def __init__(self, service: Service) -> None:
        self.service = service

    def collect(self) -> Iterator[Metric]:
        service, engine = self.service, self.service.engine
        if engine is None:
            return
        rows, cached = engine.active_rows, engine.cached_tokens
        yield GaugeMetricFamily("kvatlas_requests_waiting", "Sequences that wait for a row.", service.waiting)
        yield GaugeMetricFamily("kvatlas_rows_active", "Sequences that are being decoded.", rows)
        yield GaugeMetricFamily("kvatlas_batch_fill", "Share of the rows that are active.", rows / service.batch_size)
        yield GaugeMetricFamily("kvatlas_kv_tokens", "Tokens kept in the caches of active rows.", cached)
        yield GaugeMetricFamily("kvatlas_kv_bytes", "Bytes allocated for the cache.", engine.cache.bytes)
        yield CounterMetricFamily(
            "kvatlas_evicted_tokens", "Tokens that compressions dropped from caches.", engine.evicted_tokens
        )
        yield CounterMetricFamily(
            "kvatlas_decoded_tokens", "Tokens drawn; its rate is the tokens per second.", engine.decoded_tokens
        )


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_State(service))
        labels = ("endpoint",)
        self.answered = Counter(
            "kvatlas_requests", "Requests by how they ended.", ("endpoint", "outcome"), registry=self.registry
        )
        self.seconds = Histogram(
            "kvatlas_request_seconds", "From request to last token.", labels, buckets=_SECONDS, registry=self.registry
        )
        self.first = Histogram(
            "kvatlas_first_token_seconds",
            "From request to first piece of a stream.",
            labels,
            buckets=_SECONDS,
            registry=self.registry,
        )

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)
