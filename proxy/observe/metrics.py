"""Record → Prometheus. Labels come from closed sets only: configured tenants, known models, `other`."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    multiprocess,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from typing_extensions import override

from proxy.core.cause import CAUSES
from proxy.core.epoch import REASONS
from proxy.core.guard import ACTIONS
from proxy.core.measure import NAMES
from proxy.core.models import OTHER
from proxy.core.quota import RATES, Kind, Quotas, Verdict, periods
from proxy.environment import environment
from proxy.errors import Odd
from proxy.observe.record import OUTCOMES, Record

# The moment a counter was made says nothing here, and doubles its series.
disable_created_metrics()  # type: ignore[no-untyped-call]

_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_WAIT = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_OPERATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS = (1, 4, 16, 64, 256, 1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304, 16_777_216, 67_108_864)
_GEN_AI = ("gen_ai_operation_name", "gen_ai_request_model")
_LENGTH = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

DOCUMENTED = {
    "strata_requests_total": "Chat requests, by outcome.",
    "strata_prompt_tokens_total": "Prompt tokens forwarded as Strata counts them, by layer.",
    "strata_cached_tokens_total": "Cached prompt tokens: reported by the upstream, predicted, or as sent.",
    "strata_input_tokens_total": "Prompt tokens as the upstream counts them, by whether it said what was cached.",
    "strata_output_tokens_total": "Completion tokens as the upstream counts them.",
    "strata_cache_write_tokens_total": "Prompt tokens the upstream wrote to its prompt cache and says so.",
    "strata_cost_usd_total": "What answers cost at the upstream's prices, in US dollars.",
    "strata_as_sent_cost_usd_total": "What they would have cost as sent by the client; this less the cost was saved.",
    "strata_unpriced_total": "Answers whose usage is known and whose price is not.",
    "strata_usage_missing_total": "Answers that should have brought usage and did not.",
    "strata_quota_used_ratio": "What a configured tenant has used of a quota of a day or a month, as a share of it.",
    "strata_quota_refusals_total": "Requests over a quota, refused or (`shadow`) only reported.",
    "strata_quota_unknown_total": "Requests whose quotas could not be looked up, let through or refused.",
    "strata_token_ratio": "The upstream's own tokens for each that Strata counts, as its usage has taught.",
    "strata_references_total": "Items sent as a reference instead of their content.",
    "strata_referenced_tokens_total": "Tokens of content that references stood for.",
    "strata_uncached_tokens_total": "Prompt tokens that were not read from the prompt cache, by why.",
    "strata_cache_breaks_total": "Prompts that differ from the one before in their lineage, by where and what.",
    "strata_summaries_total": "Summaries of conversations and items, by what became of them.",
    "strata_summary_tokens_total": "Tokens of the calls that made summaries, prompts and answers.",
    "strata_summary_cost_usd_total": "What those calls cost at the upstream's prices, in US dollars.",
    "strata_dropped_tokens_total": "Tokens of history that the limit left out of what was forwarded.",
    "strata_shortened_tokens_total": "Tokens by which the limit made messages and items shorter.",
    "strata_guard_actions_total": "What the budget guard did.",
    "strata_epochs_total": "Epochs of named conversations that began, by why.",
    "strata_bypass_total": "Chat requests forwarded as they came, by cause.",
    "strata_overhead_seconds": "The proxy's own time before the upstream was called.",
    "strata_time_to_first_token_seconds": "From the request to the first piece of its answer.",
    "gen_ai_client_operation_duration_seconds": "OpenTelemetry: what the upstream took, from the call to its end.",
    "gen_ai_client_token_usage": "OpenTelemetry: tokens of a request as the upstream counts them, by type.",
    "strata_request_duration_seconds": "From the request to the end of its answer.",
    "strata_store_degraded": "1 while Redis is configured and does not answer.",
    "strata_store_errors_total": "Redis calls that failed or were late.",
    "strata_live_streams": "Streamed answers under way.",
    "strata_build_info": "The version that runs.",
}
"""Every metric by its full name; README's table and the dashboards are held to it by tests."""

MULTIPROCESS_DIR = "PROMETHEUS_MULTIPROC_DIR"
"""Where workers keep what they count; prometheus_client reads it when it is imported."""
SummaryOutcome = Literal["made", "failed", "refused", "asked"]
Together = Literal["sum", "max", "mostrecent", "livesum", "livemax"]

_FORWARDED = frozenset({"ok", "bypass", "upstream_interrupted", "client_closed", "shutdown"})
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

        def gauge(name: str, of_many: Together, *labels: str) -> Gauge:
            return Gauge(name, DOCUMENTED[name], labels, registry=self.registry, multiprocess_mode=of_many)

        def histogram(name: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, DOCUMENTED[name], labels, registry=self.registry, buckets=buckets)

        self._requests = counter("strata_requests_total", "tenant", "model", "outcome")
        self._prompt = counter("strata_prompt_tokens_total", "tenant", "model", "layer")
        self._cached = counter("strata_cached_tokens_total", "tenant", "model", "source")
        self._input = counter("strata_input_tokens_total", "tenant", "model", "prompt_cache")
        self._output = counter("strata_output_tokens_total", "tenant", "model")
        self._written = counter("strata_cache_write_tokens_total", "tenant", "model")
        self._cost = counter("strata_cost_usd_total", "tenant", "model")
        self._as_sent_cost = counter("strata_as_sent_cost_usd_total", "tenant", "model")
        self._ratio = gauge("strata_token_ratio", "mostrecent", "model")
        self._quota_used = gauge("strata_quota_used_ratio", "mostrecent", "tenant", "quota")
        self._quota_refusals = counter("strata_quota_refusals_total", "tenant", "quota", "mode")
        self._quota_unknown = counter("strata_quota_unknown_total", "tenant")
        self._unpriced = counter("strata_unpriced_total", "tenant", "model")
        self._missing = counter("strata_usage_missing_total", "tenant", "model")
        self._references = counter("strata_references_total", "tenant", "model")
        self._referenced = counter("strata_referenced_tokens_total", "tenant", "model")
        self._uncached = counter("strata_uncached_tokens_total", "tenant", "model", "cause")
        self._breaks = counter("strata_cache_breaks_total", "tenant", "layer", "kind")
        self._summaries = counter("strata_summaries_total", "tenant", "outcome")
        self._summary_tokens = counter("strata_summary_tokens_total", "tenant")
        self._summary_cost = counter("strata_summary_cost_usd_total", "tenant")
        self._dropped = counter("strata_dropped_tokens_total", "tenant", "model")
        self._shortened = counter("strata_shortened_tokens_total", "tenant", "model")
        self._actions = counter("strata_guard_actions_total", "tenant", "action")
        self._epochs = counter("strata_epochs_total", "tenant", "reason")
        self._bypass = counter("strata_bypass_total", "cause")
        self._of_operation(counter, gauge, histogram)
        self._quota_of: dict[tuple[str, Kind], tuple[str, str]] = {}
        self._create()
        self._bound = functools.lru_cache(maxsize=4096)(lambda metric, *labels: metric.labels(*labels))

    def _of_operation(
        self,
        counter: Callable[..., Counter],
        gauge: Callable[..., Gauge],
        histogram: Callable[..., Histogram],
    ) -> None:
        """Declare what tells of times and of the process."""
        self._overhead = histogram("strata_overhead_seconds", _OVERHEAD)
        self._first = histogram("strata_time_to_first_token_seconds", _WAIT, "model", "prompt_cache")
        # OpenTelemetry's own names, as Prometheus spells them (semantic conventions for GenAI metrics).
        self._operation = histogram("gen_ai_client_operation_duration_seconds", _OPERATION, *_GEN_AI)
        self._token_usage = histogram("gen_ai_client_token_usage", _TOKENS, *_GEN_AI, "gen_ai_token_type")
        self._duration = histogram("strata_request_duration_seconds", _LENGTH, "outcome")
        self.store_degraded = gauge("strata_store_degraded", "livemax")
        self._store_errors = counter("strata_store_errors_total", "operation")
        self.live_streams = gauge("strata_live_streams", "livesum")
        info = gauge("strata_build_info", "max", "version")
        info.labels(_version()).set(1)

    def _create(self) -> None:
        """Create what has few series before the first request, so that rates see it begin at 0."""
        tenants, models = self._tenants, (OTHER,)
        closed: tuple[tuple[Counter | Gauge | Histogram, tuple[Iterable[str], ...]], ...] = (
            (self._bypass, (Odd.CAUSES,)),
            (self._duration, (OUTCOMES,)),
            (self._store_errors, (STORE_OPERATIONS,)),
            (self._actions, (tenants, ACTIONS)),
            (self._quota_unknown, (tenants,)),
            (self._summary_tokens, (tenants,)),
            (self._summary_cost, (tenants,)),
            (self._summaries, (tenants, ("made", "failed", "refused"))),
            (self._uncached, (tenants, models, CAUSES)),
            (self._epochs, (tenants, REASONS)),
            (self._requests, (tenants, models, OUTCOMES)),
            (self._prompt, (tenants, models, NAMES)),
            (self._cached, (tenants, models, ("reported", "predicted", "as_sent"))),
            (self._input, (tenants, models, ("reported", "unreported"))),
            *((plain, (tenants, models)) for plain in
              (self._output, self._written, self._missing, self._references, self._referenced, self._cost,
               self._as_sent_cost, self._unpriced, self._dropped, self._shortened)),
        )  # fmt: skip
        for metric, labels in closed:
            for values in itertools.product(*labels):
                metric.labels(*values)

    def quota(self, tenant: str, quotas: Quotas, verdict: Verdict | None) -> None:
        """Tell how a request stands to its tenant's quotas; None where that could not be looked up."""
        if verdict is None:
            self._bound(self._quota_unknown, tenant).inc()
            return
        for kind in verdict.over:
            self._bound(self._quota_refusals, tenant, kind, "shadow" if quotas.shadow else "enforce").inc()
        if tenant != _ANYBODY:
            now = periods(int(time.time() * 1000))
            for kind, used in verdict.used.items():
                if kind not in RATES:
                    self._quota_of[tenant, kind] = now
                    self._bound(self._quota_used, tenant, kind).set(used / quotas.limits[kind])

    def _turn_over(self) -> None:
        """Begin a new day's or month's quotas at nothing."""
        now = periods(int(time.time() * 1000))
        for (tenant, kind), then in self._quota_of.items():
            place = int("month" in kind)
            if then[place] != now[place]:
                self._bound(self._quota_used, tenant, kind).set(0)

    def summary(self, tenant: str, outcome: SummaryOutcome, tokens: int, usd: float) -> None:
        """Count a summary, or (`asked`) one call on its account: its tokens and what it cost."""
        if outcome != "asked":
            self._summaries.labels(tenant, outcome).inc()
        self._summary_tokens.labels(tenant).inc(tokens)
        self._summary_cost.labels(tenant).inc(usd)

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
            bound(self._first, model, _read(record)).observe(record.first_token_seconds)
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
        if record.outcome in _FORWARDED:
            upstream = max(0.0, record.duration_seconds - record.overhead_seconds)
            bound(self._operation, "chat", model).observe(upstream)
        self._emit_guard(record)
        self._emit_causes(record)
        self._emit_usage(record)

    def _emit_causes(self, record: Record) -> None:
        for cause, tokens in record.causes.items():
            self._bound(self._uncached, record.tenant, record.model, cause).inc(tokens)
        if record.divergence is not None and record.outcome in _FORWARDED:
            self._bound(self._breaks, record.tenant, record.divergence.layer, record.divergence.kind).inc()

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
            # Both counters hold the same answers: where it is unknown what one would have cost, it saved nothing.
            as_sent = record.cost_usd if record.as_sent_usd is None else record.as_sent_usd
            bound(self._cost, tenant, model).inc(float(record.cost_usd))
            bound(self._as_sent_cost, tenant, model).inc(float(as_sent))
        bound(self._token_usage, "chat", model, "input").observe(usage.input_tokens)
        if usage.output_tokens:
            bound(self._token_usage, "chat", model, "output").observe(usage.output_tokens)
            bound(self._output, tenant, model).inc(usage.output_tokens)
        if usage.cache_write_tokens:
            bound(self._written, tenant, model).inc(usage.cache_write_tokens)

    async def expose(self, accept: str) -> tuple[bytes, str]:
        """Return the exposition and its content type; of several workers that of all, whichever answers.

        Many tenants have many lines: they are written in a thread, so that no stream waits for a scrape.
        """
        self._turn_over()
        return await asyncio.to_thread(self._exposition, accept)

    def _exposition(self, accept: str) -> tuple[bytes, str]:
        registry = self.registry
        if MULTIPROCESS_DIR in environment():
            registry = CollectorRegistry()
            registry.register(_All())
        if "application/openmetrics-text" in accept:
            return openmetrics.generate_latest(registry), openmetrics.CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
        return generate_latest(registry), "text/plain; version=0.0.4; charset=utf-8"


class _All(Collector):
    """What all workers have counted, those that have ended among them."""

    @override
    def collect(self) -> Iterable[Metric]:
        for family in multiprocess.MultiProcessCollector(None).collect():  # type: ignore[no-untyped-call]
            suffix = "_total" if family.type == "counter" else ""
            family.documentation = DOCUMENTED.get(family.name + suffix, family.documentation)
            yield family


def forget_worker(pid: int) -> None:
    """Let go of what only a live worker has: its streams under way."""
    multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]


def _read(record: Record) -> str:
    """Say whether a prompt was mostly read from the prompt cache, as the upstream reports it."""
    usage = record.usage
    if usage is None or usage.cache_read_tokens is None:
        return "unreported"
    return "cached" if 2 * usage.cache_read_tokens >= usage.input_tokens else "uncached"


def _version() -> str:
    try:
        return version("strata-proxy")
    except PackageNotFoundError:
        return "unknown"
