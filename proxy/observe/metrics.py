"""Record → Prometheus. Labels come from closed sets only: configured tenants, known models, `other`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from proxy.core.lineage import REASONS
from proxy.core.measure import NAMES
from proxy.core.models import OTHER
from proxy.core.plan import ACTIONS
from proxy.core.quota import Quotas, Verdict
from proxy.errors import Odd
from proxy.observe.record import OUTCOMES, Record

# The moment a counter was made says nothing here, and doubles its series.
disable_created_metrics()  # type: ignore[no-untyped-call]

_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_WAIT = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_LENGTH = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

DOCUMENTED = {
    "strata_requests_total": "Chat requests, by outcome.",
    "strata_prompt_tokens_total": "Prompt tokens forwarded as Strata counts them, by layer.",
    "strata_cached_tokens_total": "Cached prompt tokens: reported by the upstream, predicted, or as sent.",
    "strata_input_tokens_total": "Prompt tokens as the upstream counts them, by whether it said what was cached.",
    "strata_output_tokens_total": "Completion tokens as the upstream counts them.",
    "strata_cache_write_tokens_total": "Prompt tokens the upstream wrote to its prompt cache and says so.",
    "strata_cost_usd_total": "What answers cost at the upstream's prices, in US dollars.",
    "strata_saved_usd": "What the client's own bytes would have cost more; may fall, and be negative.",
    "strata_unpriced_total": "Answers whose usage is known and whose price is not.",
    "strata_usage_missing_total": "Answers that should have brought usage and did not.",
    "strata_quota_used_ratio": "What a configured tenant has used of a quota, as a share of it; reserved included.",
    "strata_quota_refusals_total": "Requests over a quota, refused or (`shadow`) only told of.",
    "strata_quota_unknown_total": "Requests whose quotas could not be looked up, let through or refused.",
    "strata_token_ratio": "The upstream's own tokens for each that Strata counts, as its usage has taught.",
    "strata_references_total": "Items sent as a reference instead of their content.",
    "strata_referenced_tokens_total": "Tokens of content that references stood for.",
    "strata_summaries_total": "Summaries of conversations and items, by what became of them.",
    "strata_dropped_tokens_total": "Tokens of history that the limit left out of what was forwarded.",
    "strata_shortened_tokens_total": "Tokens by which the limit made messages and items shorter.",
    "strata_guard_actions_total": "What the budget guard did.",
    "strata_epochs_total": "Epochs of named conversations that began, by why.",
    "strata_bypass_total": "Chat requests forwarded as they came, by cause.",
    "strata_overhead_seconds": "The proxy's own time before the upstream was called.",
    "strata_time_to_first_token_seconds": "From the request to the first piece of its answer.",
    "strata_request_duration_seconds": "From the request to the end of its answer.",
    "strata_store_degraded": "1 while Redis is configured and does not answer.",
    "strata_store_errors_total": "Redis calls that failed or were late.",
    "strata_live_streams": "Streamed answers under way.",
    "strata_build_info": "The version that runs.",
}
"""Every metric by its full name; README's table and the dashboards are held to it by tests."""

_FORWARDED = frozenset({"ok", "bypass", "upstream_interrupted", "client_closed"})
STORE_OPERATIONS = ("recall", "remember", "forget", "view", "quota", "calibration")
_ANYBODY = "default"
"""Whose clients bring their own keys; each of them has quotas of its own."""


class Metrics:
    """All series of one process, its children bound once."""

    def __init__(self, tenants: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        self._tenants = (*tenants, _ANYBODY)

        def counter(name: str, *labels: str) -> Counter:
            return Counter(name.removesuffix("_total"), DOCUMENTED[name], labels, registry=self.registry)

        def histogram(name: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, DOCUMENTED[name], labels, registry=self.registry, buckets=buckets)

        self._requests = counter("strata_requests_total", "tenant", "model", "outcome")
        self._prompt = counter("strata_prompt_tokens_total", "tenant", "model", "layer")
        self._cached = counter("strata_cached_tokens_total", "tenant", "model", "source")
        self._input = counter("strata_input_tokens_total", "tenant", "model", "prompt_cache")
        self._output = counter("strata_output_tokens_total", "tenant", "model")
        self._written = counter("strata_cache_write_tokens_total", "tenant", "model")
        self._cost = counter("strata_cost_usd_total", "tenant", "model")
        self._saved = Gauge(
            "strata_saved_usd", DOCUMENTED["strata_saved_usd"], ("tenant", "model"), registry=self.registry
        )
        self._ratio = Gauge("strata_token_ratio", DOCUMENTED["strata_token_ratio"], ("model",), registry=self.registry)
        self._quota_used = Gauge(
            "strata_quota_used_ratio",
            DOCUMENTED["strata_quota_used_ratio"],
            ("tenant", "quota"),
            registry=self.registry,
        )
        self._quota_refusals = counter("strata_quota_refusals_total", "tenant", "quota", "mode")
        self._quota_unknown = counter("strata_quota_unknown_total", "tenant")
        self._unpriced = counter("strata_unpriced_total", "tenant", "model")
        self._missing = counter("strata_usage_missing_total", "tenant", "model")
        self._references = counter("strata_references_total", "tenant", "model")
        self._referenced = counter("strata_referenced_tokens_total", "tenant", "model")
        self._summaries = counter("strata_summaries_total", "tenant", "outcome")
        self._dropped = counter("strata_dropped_tokens_total", "tenant", "model")
        self._shortened = counter("strata_shortened_tokens_total", "tenant", "model")
        self._actions = counter("strata_guard_actions_total", "tenant", "action")
        self._epochs = counter("strata_epochs_total", "tenant", "reason")
        self._bypass = counter("strata_bypass_total", "cause")
        self._overhead = histogram("strata_overhead_seconds", _OVERHEAD)
        self._first = histogram("strata_time_to_first_token_seconds", _WAIT, "model")
        self._duration = histogram("strata_request_duration_seconds", _LENGTH, "outcome")
        self.store_degraded = Gauge(
            "strata_store_degraded", DOCUMENTED["strata_store_degraded"], registry=self.registry
        )
        self._store_errors = counter("strata_store_errors_total", "operation")
        self.live_streams = Gauge("strata_live_streams", DOCUMENTED["strata_live_streams"], registry=self.registry)
        info = Gauge("strata_build_info", DOCUMENTED["strata_build_info"], ("version",), registry=self.registry)
        info.labels(_version()).set(1)
        self._create()
        self._bound = functools.lru_cache(maxsize=4096)(lambda metric, *labels: metric.labels(*labels))

    def _create(self) -> None:
        """Create what has few series before the first request, so that rates see it begin at 0."""
        tenants, models = self._tenants, (OTHER,)
        closed: tuple[tuple[Counter | Gauge | Histogram, tuple[Iterable[str], ...]], ...] = (
            (self._bypass, (Odd.CAUSES,)),
            (self._duration, (OUTCOMES,)),
            (self._store_errors, (STORE_OPERATIONS,)),
            (self._actions, (tenants, ACTIONS)),
            (self._quota_unknown, (tenants,)),
            (self._epochs, (tenants, REASONS)),
            (self._requests, (tenants, models, OUTCOMES)),
            (self._prompt, (tenants, models, NAMES)),
            (self._cached, (tenants, models, ("reported", "predicted", "as_sent"))),
            (self._input, (tenants, models, ("reported", "unreported"))),
            *((plain, (tenants, models)) for plain in
              (self._output, self._written, self._missing, self._references, self._referenced, self._cost,
               self._saved, self._unpriced, self._dropped, self._shortened)),
        )  # fmt: skip
        for metric, labels in closed:
            for values in itertools.product(*labels):
                metric.labels(*values)

    def quota(self, tenant: str, quotas: Quotas, verdict: Verdict | None) -> None:
        """Tell how a request stands to its tenant's quotas; None where that could not be looked up."""
        if verdict is None:
            self._bound(self._quota_unknown, tenant).inc()
            return
        if verdict.over is not None:
            self._bound(self._quota_refusals, tenant, verdict.over, "shadow" if quotas.shadow else "enforce").inc()
        if tenant != _ANYBODY:
            for kind, used in verdict.used.items():
                self._bound(self._quota_used, tenant, kind).set(used / quotas.limits[kind])

    def summary(self, tenant: str, outcome: str) -> None:
        """Count a summary: `made`, `failed`, or `refused` by a quota."""
        self._summaries.labels(tenant, outcome).inc()

    def token_ratio(self, model: str, ratio: float) -> None:
        """Tell what a model's tokens are to those counted."""
        self._ratio.labels(model).set(ratio)

    def store_error(self, operation: str) -> None:
        """Count one failed call of the store."""
        self._store_errors.labels(operation).inc()

    def emit(self, record: Record) -> None:
        """Project one record."""
        bound, tenant, model = self._bound, record.tenant, record.model
        bound(self._requests, tenant, model, record.outcome).inc()
        bound(self._duration, record.outcome).observe(record.duration_seconds)
        self._overhead.observe(record.overhead_seconds)
        if record.first_token_seconds is not None:
            bound(self._first, model).observe(record.first_token_seconds)
        if record.cause in Odd.CAUSES:
            bound(self._bypass, record.cause).inc()
        if record.began is not None:
            bound(self._epochs, tenant, record.began).inc()
        if record.layers is not None and record.outcome in _FORWARDED:
            for layer in record.layers.each:
                if layer.tokens:
                    bound(self._prompt, tenant, model, layer.name).inc(layer.tokens)
        if record.references:
            bound(self._references, tenant, model).inc(record.references)
            bound(self._referenced, tenant, model).inc(record.referenced_tokens)
        self._emit_guard(record)
        self._emit_usage(record)

    def _emit_guard(self, record: Record) -> None:
        bound, tenant, model = self._bound, record.tenant, record.model
        for action in record.actions:
            bound(self._actions, tenant, action).inc()
        if record.losses.dropped_tokens:
            bound(self._dropped, tenant, model).inc(record.losses.dropped_tokens)
        if record.losses.shortened_tokens:
            bound(self._shortened, tenant, model).inc(record.losses.shortened_tokens)

    def _emit_usage(self, record: Record) -> None:
        bound, tenant, model, usage = self._bound, record.tenant, record.model, record.usage
        if usage is None:
            if record.usage_due:
                bound(self._missing, tenant, model).inc()
            return
        known = usage.cache_read_tokens is not None
        bound(self._input, tenant, model, "reported" if known else "unreported").inc(usage.input_tokens)
        if usage.cache_read_tokens:
            bound(self._cached, tenant, model, "reported").inc(usage.cache_read_tokens)
        for source, tokens in (("predicted", record.predicted_tokens), ("as_sent", record.as_sent_tokens)):
            if tokens:
                bound(self._cached, tenant, model, source).inc(tokens)
        if record.cost_usd is None:
            bound(self._unpriced, tenant, model).inc()
        else:
            bound(self._cost, tenant, model).inc(float(record.cost_usd))
        if record.saved_usd:
            bound(self._saved, tenant, model).inc(float(record.saved_usd))
        if usage.output_tokens:
            bound(self._output, tenant, model).inc(usage.output_tokens)
        if usage.cache_write_tokens:
            bound(self._written, tenant, model).inc(usage.cache_write_tokens)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition and its content type."""
        if "application/openmetrics-text" in accept:
            return openmetrics.generate_latest(self.registry), openmetrics.CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
        return generate_latest(self.registry), "text/plain; version=0.0.4; charset=utf-8"


def _version() -> str:
    try:
        return version("strata-proxy")
    except PackageNotFoundError:
        return "unknown"
