"""The dashboards as code: `python grafana/build.py` writes the JSON files beside it, which Grafana is given.

A panel is a title, what it shows, a unit and queries; where it stands is worked out. A test holds the files to this.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WIDTH = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
BY = 'tenant=~"$tenant", model=~"$model"'
OF_TENANT = 'tenant=~"$tenant"'
RATE = "[$__rate_interval]"
RANGE = "[$__range]"
LAYERS = (
    ("tools", "tools", "#8AB8FF"), ("L1", "L1 system and policies", "#3274D9"), ("L2", "L2 context library", "#56A64B"),
    ("L4", "L4 history", "#96D98D"), ("L3", "L3 turn context", "#FADE2A"), ("L5", "L5 the user's words", "#FF9830"),
)  # fmt: skip
CAUSES = (
    ("new", "#96D98D"), ("cold_start", "#8AB8FF"), ("expired", "#B877D9"), ("changed", "#F2495C"),
    ("below_minimum", "#C8C8C8"), ("provider_miss", "#FF9830"), ("unreported", "#808080"),
)  # fmt: skip

Query = tuple[str, str]
"""An expression, and how its series are called."""
Steps = Sequence[tuple[str, float | None]]
GREEN: Steps = (("green", None),)
PLAIN: Steps = (("text", None),)


@dataclass(frozen=True)
class Panel:
    """One panel. `stat` shows a number over the range; else lines, stacked where `stacked`."""

    title: str
    about: str
    unit: str
    queries: Sequence[Query]
    stat: bool = False
    stacked: bool = False
    steps: Steps = GREEN
    colours: Sequence[tuple[str, str]] = ()
    width: int = 12
    least: float | None = None
    decimals: int | None = None
    names: Sequence[tuple[str, str, str]] = ()


@dataclass(frozen=True)
class Section:
    """A row's heading and its panels."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Dashboard:
    """One file. The first section has no heading, and the text that says how to read it beside it."""

    name: str
    title: str
    about: str
    text: str
    sections: Sequence[Section] = field(default_factory=tuple)


def stat(title: str, about: str, unit: str, query: str, *, steps: Steps = PLAIN, decimals: int | None = None) -> Panel:
    """Return a number."""
    return Panel(title, about, unit, [(query, "")], stat=True, steps=steps, width=4, decimals=decimals)


def share(part: str, whole: str) -> str:
    """Return a share that is 0 where the part is not there, and nothing where the whole is 0."""
    return f"({part} or vector(0)) / ({whole} > 0)"


INPUT_REPORTED = f'sum(increase(strata_input_tokens_total{{{BY}, prompt_cache="reported"}}{RANGE}))'
COST = f"sum(increase(strata_cost_usd_total{{{BY}}}{RANGE}))"
AS_SENT_COST = f"sum(increase(strata_as_sent_cost_usd_total{{{BY}}}{RANGE}))"
SAVED = f"{AS_SENT_COST} - {COST}"


def saved_an_hour(label: str) -> str:
    """Return what was saved an hour, by a label."""
    both = [
        f"sum by ({label}) (rate(strata_{name}{{{BY}}}{RATE}))" for name in ("as_sent_cost_usd_total", "cost_usd_total")
    ]
    return f"({both[0]} - {both[1]}) * 3600"


def cached(source: str) -> str:
    """Return cached tokens of a source over the range."""
    return f'sum(increase(strata_cached_tokens_total{{{BY}, source="{source}"}}{RANGE}))'


LAYER_PANEL = Panel(
    "Prompt tokens by layer",
    "What is forwarded, by layer, in the order in which it stands in a prompt.",
    "si:tok/s",
    [(f'sum(rate(strata_prompt_tokens_total{{{BY}, layer="{layer}"}}{RATE}))', name) for layer, name, _ in LAYERS],
    stacked=True,
    colours=[(name, colour) for _, name, colour in LAYERS],
    least=0,
)

SAVINGS = Dashboard(
    "savings",
    "Strata · Savings",
    "What answers cost, what was saved, and how much of each prompt came from the prompt cache.",
    """**Saved** is what the clients' own bytes would have cost more: their prompt, read from the prompt cache as far as it
would have held it, less what was paid. It may be negative, where replay sends more than the client did.

**Cached share** is what you pay less for; **uplift** is how much of it is Strata's doing: *reported* (the upstream's word)
less *as_sent* (what the clients' own bytes would have got). *predicted* is what Strata expects.

If the cached share falls, go on to *Cache health*. Layers: **L1** system and policies · **L2** context library · **L3** turn
context · **L4** history · **L5** the user's own words. What is not reported is never counted as 0.""",
    [
        Section("", [
            stat("Saved", "US dollars saved in the time range shown; negative where more was sent than saved.",
                 "currencyUSD", SAVED, steps=[("red", None), ("text", 0), ("green", 0.01)]),
            stat("Cost", "US dollars paid in the time range shown, of models whose price is known.", "currencyUSD", COST),
            stat("Saved share", "What was saved, as a share of what the clients' own bytes would have cost.", "percentunit",
                 f"({SAVED}) / ({AS_SENT_COST} > 0)", steps=[("red", None), ("text", 0), ("green", 0.2)]),
            stat("Cached share", "Tokens read from the prompt cache, as a share of those whose upstream says so.",
                 "percentunit", share(cached("reported"), INPUT_REPORTED),
                 steps=[("red", None), ("orange", 0.3), ("green", 0.6)]),
            stat("Uplift", "Cached tokens reported less those the clients' own bytes would have got, as a share of all.",
                 "percentunit", f"(({cached('reported')} or vector(0)) - ({cached('as_sent')} or vector(0))) / "
                 f"({INPUT_REPORTED} > 0)", steps=[("red", None), ("text", 0), ("green", 0.05)]),
            stat("Unpriced answers", "Answers whose usage is known and whose price is not; they count in no dollar here.",
                 "short", f"sum(increase(strata_unpriced_total{{{BY}}}{RANGE}))", steps=[("text", None), ("orange", 1)],
                 decimals=0),
        ]),
        Section("Money", [
            Panel("Cost an hour by model", "What answers cost at the upstream's prices.", "currencyUSD",
                  [(f"sum by (model) (rate(strata_cost_usd_total{{{BY}}}{RATE})) * 3600", "{{model}}")], width=8),
            Panel("Saved an hour by tenant", "What the clients' own bytes would have cost more; negative where less.",
                  "currencyUSD", [(saved_an_hour("tenant"), "{{tenant}}")], width=8),
            Panel("Saved an hour by model", "The same by model.", "currencyUSD",
                  [(saved_an_hour("model"), "{{model}}")], width=8),
        ]),
        Section("Prompt cache", [
            Panel("Cached share by model", "Reported cached tokens as a share of the prompt tokens whose upstream says so.",
                  "percentunit", [(
                      f'sum by (model) (rate(strata_cached_tokens_total{{{BY}, source="reported"}}{RATE})) / '
                      f'(sum by (model) (rate(strata_input_tokens_total{{{BY}, prompt_cache="reported"}}{RATE})) > 0)',
                      "{{model}}")], least=0),
            Panel("Cached tokens by source", "Reported by the upstream, predicted by Strata, and as sent: what the clients' "
                  "own bytes would have got.", "si:tok/s",
                  [(f"sum by (source) (rate(strata_cached_tokens_total{{{BY}}}{RATE}))", "{{source}}")], least=0),
            LAYER_PANEL,
            Panel("Tokens referenced instead of repeated", "Content that stands earlier in the prompt, named by a line.",
                  "si:tok/s", [(f"sum by (model) (rate(strata_referenced_tokens_total{{{BY}}}{RATE}))", "{{model}}")], least=0),
            Panel("Tokens written to the prompt cache", "Of upstreams that charge for writing and say so.", "si:tok/s",
                  [(f"sum by (model) (rate(strata_cache_write_tokens_total{{{BY}}}{RATE}))", "{{model}}")], least=0),
            Panel("Output tokens", "What the models wrote.", "si:tok/s",
                  [(f"sum by (model) (rate(strata_output_tokens_total{{{BY}}}{RATE}))", "{{model}}")], least=0),
        ]),
    ],
)  # fmt: skip

CACHE = Dashboard(
    "cache-health",
    "Strata · Cache health",
    "Why prompt tokens were not read from the prompt cache, and what broke it.",
    """Each prompt token that was not read from the prompt cache has one cause. **new**: the tail, never read before, and good.
**cold_start**: the first prompt of a conversation. **changed**: something in front of it differs from the prompt before;
*Breaks* names where (parameters, tools, **L1**, L2, L3, L4, L5) and what: a clock, a nonce, tools in another order, an edited history.
**expired**: idle for longer than the cache lives. **below_minimum**: too short, or a block's rest. **provider_miss**: it should
have been there. **unreported**: the upstream does not say.

*changed* in `observe` mode is the client's own doing, and what Strata would mend. *reported* far below *predicted*: the
upstream drops its cache or spreads you over machines; *as_sent* is what no proxy would have got. One request's own story:
`GET /strata/requests/{id}`, and `strata explain`.""",
    [
        Section("", [
            stat("Changed share", "Tokens read again because something in front of them changed, as a share of the prompt.",
                 "percentunit", share(f'sum(increase(strata_uncached_tokens_total{{{BY}, cause="changed"}}{RANGE}))',
                                      f"sum(increase(strata_input_tokens_total{{{BY}}}{RANGE}))"),
                 steps=[("green", None), ("orange", 0.1), ("red", 0.3)]),
            stat("Breaks", "Prompts that differ from the one before in their lineage.", "short",
                 f"sum(increase(strata_cache_breaks_total{{{OF_TENANT}}}{RANGE})) or vector(0)", decimals=0),
            stat("Reported of predicted", "Cached tokens reported as a share of those predicted; well below 1 the upstream "
                 "loses its cache.", "percentunit", f"{cached('reported')} / ({cached('predicted')} > 0)",
                 steps=[("red", None), ("orange", 0.8), ("green", 0.95)]),
            stat("Expired share", "Tokens whose prompt cache had gone cold, as a share of the prompt.", "percentunit",
                 share(f'sum(increase(strata_uncached_tokens_total{{{BY}, cause="expired"}}{RANGE}))',
                       f"sum(increase(strata_input_tokens_total{{{BY}}}{RANGE}))"),
                 steps=[("green", None), ("orange", 0.1)]),
            stat("Missed share", "Tokens that should have been in the prompt cache and were not.", "percentunit",
                 share(f'sum(increase(strata_uncached_tokens_total{{{BY}, cause="provider_miss"}}{RANGE}))',
                       f"sum(increase(strata_input_tokens_total{{{BY}}}{RANGE}))"),
                 steps=[("green", None), ("orange", 0.1), ("red", 0.3)]),
            stat("Unreported share", "Prompt tokens of upstreams that do not say what was cached.", "percentunit",
                 share(f'sum(increase(strata_input_tokens_total{{{BY}, prompt_cache="unreported"}}{RANGE}))',
                       f"sum(increase(strata_input_tokens_total{{{BY}}}{RANGE}))"),
                 steps=[("green", None), ("orange", 0.1)]),
        ]),
        Section("Causes", [
            Panel("Uncached tokens by cause", "Every prompt token that was not read from the prompt cache, by its one cause.",
                  "si:tok/s", [(f'sum(rate(strata_uncached_tokens_total{{{BY}, cause="{cause}"}}{RATE}))', cause)
                               for cause, _ in CAUSES], stacked=True, colours=CAUSES, width=24, least=0),
            Panel("Breaks by kind", "What it was that differed first.", "reqps",
                  [(f"sum by (kind) (rate(strata_cache_breaks_total{{{OF_TENANT}}}{RATE})) or vector(0)", "{{kind}}")], least=0),
            Panel("Breaks by layer", "Where it was.", "reqps",
                  [(f"sum by (layer) (rate(strata_cache_breaks_total{{{OF_TENANT}}}{RATE})) or vector(0)", "{{layer}}")],
                  least=0),
        ]),
        Section("Prediction and epochs", [
            Panel("Cached tokens: reported, predicted, as sent", "The upstream's word, Strata's expectation, and what the "
                  "clients' own bytes would have got.", "si:tok/s",
                  [(f"sum by (source) (rate(strata_cached_tokens_total{{{BY}}}{RATE}))", "{{source}}")], least=0),
            Panel("Epochs by reason", "Epochs of named conversations that began: each is one re-read behind L1.", "reqps",
                  [(f"sum by (reason) (rate(strata_epochs_total{{{OF_TENANT}}}{RATE}))", "{{reason}}")], least=0),
            Panel("Expired tokens by model", "Lifetimes that are too short for how people pause.", "si:tok/s",
                  [(f'sum by (model) (rate(strata_uncached_tokens_total{{{BY}, cause="expired"}}{RATE}))', "{{model}}")],
                  least=0),
            Panel("Time to first token by prompt cache", "The median, of prompts that were mostly read from the cache and of "
                  "the others.", "s",
                  [(f'histogram_quantile(0.5, sum by (le, prompt_cache) (rate(strata_time_to_first_token_seconds_bucket'
                    f'{{model=~"$model"}}{RATE})))', "{{prompt_cache}}")], least=0),
        ]),
    ],
)  # fmt: skip

BUDGET = Dashboard(
    "budget",
    "Strata · Budget",
    "How large prompts are, what a budget took from them, and what tenants have used of their quotas.",
    """**Prompt tokens by layer** is what is forwarded: **L1** system and policies · **L2** context library · **L3** turn context ·
**L4** history · **L5** the user's own words. **Dropped** and **shortened** tokens are what a budget left out of it. *Guard actions*
say how: outlines and shortened outputs lose little, dropped turns more; *forwarded_over_budget* is what could not be made to
fit. A cut is one re-read: if turns are dropped often, the budget is tight for how your agents work.

**Quota used** is each tenant's share of each of its quotas, what is reserved for requests under way among it. At 1 requests
are refused (or only reported, in `shadow`). *Token ratio*: the upstream's tokens for each that Strata counts; limits are divided by
it. Cached tokens (*reported*, *predicted*, *as_sent*) are on the other pages.""",
    [
        Section("", [
            stat("Dropped share", "History left out, as a share of what would have been forwarded.", "percentunit",
                 share(f"sum(increase(strata_dropped_tokens_total{{{BY}}}{RANGE}))",
                       f"sum(increase(strata_prompt_tokens_total{{{BY}}}{RANGE}))"),
                 steps=[("green", None), ("orange", 0.5)]),
            stat("Shortened tokens", "By how much messages and items were made shorter.", "short",
                 f"sum(increase(strata_shortened_tokens_total{{{BY}}}{RANGE}))", decimals=0),
            stat("Over budget all the same", "Prompts that could not be made to fit and were forwarded.", "short",
                 f'sum(increase(strata_guard_actions_total{{{OF_TENANT}, action="forwarded_over_budget"}}{RANGE}))',
                 steps=[("green", None), ("orange", 1)], decimals=0),
            stat("Refused over a quota", "Requests that a quota refused, or in shadow would have.", "short",
                 f"sum(increase(strata_quota_refusals_total{{{OF_TENANT}}}{RANGE})) or vector(0)",
                 steps=[("green", None), ("orange", 1)], decimals=0),
            stat("Highest quota use", "The fullest quota of any tenant chosen.", "percentunit",
                 f"max(strata_quota_used_ratio{{{OF_TENANT}}}) or vector(0)",
                 steps=[("green", None), ("orange", 0.8), ("red", 1)]),
            stat("Quotas unknown", "Requests whose quotas could not be looked up, for want of Redis.", "short",
                 f"sum(increase(strata_quota_unknown_total{{{OF_TENANT}}}{RANGE}))",
                 steps=[("green", None), ("red", 1)], decimals=0),
        ]),
        Section("Prompts", [
            LAYER_PANEL,
            Panel("Guard actions", "What the budget guard did, requests a second.", "reqps",
                  [(f"sum by (action) (rate(strata_guard_actions_total{{{OF_TENANT}}}{RATE}))", "{{action}}")], least=0),
            Panel("Tokens the budget took", "Whole messages left out, and what messages and items were made shorter by.",
                  "si:tok/s", [(f"sum(rate(strata_dropped_tokens_total{{{BY}}}{RATE}))", "dropped"),
                               (f"sum(rate(strata_shortened_tokens_total{{{BY}}}{RATE}))", "shortened")], stacked=True, least=0),
            Panel("Summaries", "Made beside the requests, failed, or refused by a quota.", "reqps",
                  [(f"sum by (outcome) (rate(strata_summaries_total{{{OF_TENANT}}}{RATE})) or vector(0)", "{{outcome}}")],
                  least=0),
        ]),
        Section("Quotas", [
            Panel("Quota used", "Each tenant's share of each of its quotas.", "percentunit",
                  [(f"max by (tenant, quota) (strata_quota_used_ratio{{{OF_TENANT}}}) or vector(0)", "{{tenant}} {{quota}}")],
                  steps=[("green", None), ("orange", 0.8), ("red", 1)], least=0),
            Panel("Refusals by quota", "Refused, or only reported in shadow.", "reqps",
                  [(f"sum by (tenant, quota, mode) (rate(strata_quota_refusals_total{{{OF_TENANT}}}{RATE})) or vector(0)",
                    "{{tenant}} {{quota}} {{mode}}")], least=0),
            Panel("Token ratio", "The upstream's tokens for each that Strata counts, as its usage has taught.", "short",
                  [('max by (model) (strata_token_ratio{model=~"$model"}) or vector(1)', "{{model}}")]),
        ]),
    ],
)  # fmt: skip

FAILED = "error|upstream_error|upstream_interrupted"
OPERATIONS = Dashboard(
    "operations",
    "Strata · Operations",
    "Whether requests go through, how long they take, and whether memory answers.",
    """**Overhead** is the proxy's own time before the upstream is called: milliseconds, whatever the upstream takes. **Bypass** is a
request that Strata did not understand and forwarded as it came; its cause says why. **Failed** is the upstream's doing
(`upstream_error`, `upstream_interrupted`) or Strata's (`error`): the latter should be 0. **shutdown** is an answer that a restart
cut off at `STRATA_SHUTDOWN_SECONDS`.

**Store** 1: Redis is configured and does not answer. Requests go on, planned from the process's own copy (**L1** … **L5** hold);
each conversation may lose its prompt cache once when it goes and once when it returns: **reported** cached tokens fall below
**predicted**, towards **as_sent**. Layers: L1 system and policies, L2 context library, L3 turn context, L4 history, L5 the
user's own words.""",
    [
        Section("", [
            stat("Requests", "Requests answered in the time range shown, whatever their outcome.", "short",
                 f"sum(increase(strata_requests_total{{{BY}}}{RANGE}))", decimals=0),
            stat("Failed", "Requests that the upstream or Strata failed, as a share of all.", "percentunit",
                 share(f'sum(increase(strata_requests_total{{{BY}, outcome=~"{FAILED}"}}{RANGE}))',
                       f"sum(increase(strata_requests_total{{{BY}}}{RANGE}))"),
                 steps=[("green", None), ("orange", 0.01), ("red", 0.05)]),
            stat("Overhead p99", "The proxy's own time before the upstream is called.", "s",
                 f"histogram_quantile(0.99, sum by (le) (increase(strata_overhead_seconds_bucket{RANGE})))",
                 steps=[("green", None), ("orange", 0.05), ("red", 0.25)]),
            stat("Bypassed", "Requests forwarded as they came, as a share of all.", "percentunit",
                 share(f'sum(increase(strata_requests_total{{{BY}, outcome="bypass"}}{RANGE}))',
                       f"sum(increase(strata_requests_total{{{BY}}}{RANGE}))"),
                 steps=[("green", None), ("orange", 0.01), ("red", 0.1)]),
            stat("Store", "1 while Redis is configured and does not answer.", "bool_yes_no", "max(strata_store_degraded)",
                 steps=[("green", None), ("red", 1)]),
            stat("Version", "The versions that run.", "short", "count by (version) (strata_build_info)", decimals=0),
        ]),
        Section("Traffic", [
            Panel("Requests by outcome", "Requests a second.", "reqps",
                  [(f"sum by (outcome) (rate(strata_requests_total{{{BY}}}{RATE}))", "{{outcome}}")], least=0),
            Panel("Bypass by cause", "Requests forwarded as they came, and why.", "reqps",
                  [(f"sum by (cause) (rate(strata_bypass_total{RATE}))", "{{cause}}")], least=0),
            Panel("Usage missing", "Answers that should have brought usage and did not, as a share.", "percentunit",
                  [(f"sum by (model) (rate(strata_usage_missing_total{{{BY}}}{RATE})) / "
                    f'(sum by (model) (rate(strata_requests_total{{{BY}, outcome!="refused"}}{RATE})) > 0)', "{{model}}")],
                  least=0),
            Panel("Live streams", "Streamed answers under way.", "short", [("sum by (instance) (strata_live_streams)", "{{instance}}")],
                  least=0),
        ]),
        Section("Time", [
            Panel("Overhead", "The proxy's own time before the upstream is called.", "s",
                  [(f"histogram_quantile({quantile}, sum by (le) (rate(strata_overhead_seconds_bucket{RATE})))", name)
                   for quantile, name in ((0.5, "median"), (0.99, "p99"))], least=0),
            Panel("Time to first token", "From the request to the first piece of its answer.", "s",
                  [(f'histogram_quantile({quantile}, sum by (le) (rate(strata_time_to_first_token_seconds_bucket'
                    f'{{model=~"$model"}}{RATE})))', name) for quantile, name in ((0.5, "median"), (0.95, "p95"))], least=0),
            Panel("Duration p95 by outcome", "From the request to the end of its answer.", "s",
                  [(f"histogram_quantile(0.95, sum by (le, outcome) (rate(strata_request_duration_seconds_bucket{RATE})) > 0)",
                    "{{outcome}}")], least=0),
            Panel("Upstream duration p95", "OpenTelemetry's `gen_ai.client.operation.duration`: what the upstream took.", "s",
                  [(f"histogram_quantile(0.95, sum by (le) (rate(gen_ai_client_operation_duration_seconds_bucket{RATE})))",
                    "p95")], least=0),
        ]),
        Section("Memory", [
            Panel("Store degraded", "1 while Redis is configured and does not answer.", "short",
                  [("max by (instance) (strata_store_degraded)", "{{instance}}")], steps=[("green", None), ("red", 1)], least=0),
            Panel("Store errors by operation", "Redis calls that failed or were late.", "reqps",
                  [(f"sum by (operation) (rate(strata_store_errors_total{RATE}))", "{{operation}}")], least=0),
        ]),
    ],
)  # fmt: skip

DASHBOARDS = (SAVINGS, CACHE, BUDGET, OPERATIONS)


def built(dashboard: Dashboard) -> dict[str, Any]:
    """Return what Grafana is given."""
    panels = list(_placed(dashboard))
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": f"strata-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.about,
        "tags": ["strata", "llm", "prompt-caching"],
        "schemaVersion": 42,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "fiscalYearStartMonth": 0,
        "preload": False,
        "timezone": "browser",
        "weekStart": "",
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timepicker": {},
        "links": [
            {"title": "Strata", "type": "dashboards", "tags": ["strata"], "asDropdown": False, "icon": "external link",
             "includeVars": True, "keepTime": True, "targetBlank": False, "tooltip": "", "url": ""},
        ],
        "annotations": {"list": []},
        "templating": {"list": [_source(), _variable("tenant", "Tenant", "strata_requests_total"),
                                _variable("model", "Model", 'strata_requests_total{tenant=~"$tenant"}')]},
        "panels": panels,
    }  # fmt: skip


def _placed(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    y = 0
    for section in dashboard.sections:
        if section.title:
            yield {"type": "row", "title": section.title, "collapsed": False, "panels": [],
                   "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}  # fmt: skip
            y += 1
        x = 0
        height = 4 if not section.title else 8
        # The numbers stand in two rows of three beside the text.
        most = WIDTH if section.title else 12
        for panel in section.panels:
            if x + panel.width > most:
                x, y = 0, y + height
            yield _panel(panel, {"x": x, "y": y, "w": panel.width, "h": height})
            x += panel.width
        y += height
        if not section.title:
            yield {
                "type": "text", "title": "How to read this", "gridPos": {"x": 12, "y": 0, "w": 12, "h": 8},
                "description": "What the figures on this dashboard mean, and where to look first.",
                "options": {"mode": "markdown", "content": dashboard.text.replace("\n\n", "\0").replace("\n", " ")
                            .replace("\0", "\n\n"),
                            "code": {"language": "plaintext", "showLineNumbers": False, "showMiniMap": False}},
            }  # fmt: skip


def _panel(panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "color": {"mode": "thresholds" if panel.stat else "palette-classic-by-name"},
        "thresholds": {
            "mode": "absolute",
            "steps": [{"color": colour, "value": value} for colour, value in panel.steps],
        },
        "mappings": [],
        "noValue": "–",
    }
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    if panel.least is not None:
        defaults["min"] = panel.least
    if not panel.stat:
        defaults["custom"] = _lines(stacked=panel.stacked)
    options: dict[str, Any] = {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["mean", "lastNotNull"]},
        "tooltip": {"mode": "multi", "sort": "desc", "hideZeros": True},
    }
    if panel.stat:
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "orientation": "auto",
            "textMode": "auto", "colorMode": "value", "graphMode": "none", "justifyMode": "auto", "wideLayout": True,
            "showPercentChange": False, "percentChangeColorMode": "standard",
        }  # fmt: skip
        if panel.title == "Version":
            options["textMode"] = "name"
    return {
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.about,
        "gridPos": position,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": [_coloured(*pair) for pair in panel.colours]},
        "options": options,
        "targets": [_target(place, *query, instant=panel.stat) for place, query in enumerate(panel.queries)],
    }


def _target(place: int, expression: str, legend: str, *, instant: bool) -> dict[str, Any]:
    if instant and "by (version)" in expression:
        legend = "{{version}}"
    return {
        "refId": "ABCDEFGHIJ"[place], "datasource": SOURCE, "editorMode": "code", "expr": expression,
        "legendFormat": legend, "instant": instant, "range": not instant,
    }  # fmt: skip


def _coloured(name: str, colour: str) -> dict[str, Any]:
    value = {"mode": "fixed", "fixedColor": colour}
    return {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "color", "value": value}]}


def _lines(*, stacked: bool) -> dict[str, Any]:
    return {
        "drawStyle": "line", "lineInterpolation": "linear", "lineWidth": 1 if stacked else 2,
        "fillOpacity": 60 if stacked else 8, "gradientMode": "none", "showPoints": "never", "pointSize": 4,
        "spanNulls": False, "insertNulls": False, "axisPlacement": "auto", "axisLabel": "", "axisColorMode": "text",
        "axisBorderShow": False, "axisCenteredZero": False, "scaleDistribution": {"type": "linear"}, "barAlignment": 0,
        "stacking": {"group": "A", "mode": "normal" if stacked else "none"}, "thresholdsStyle": {"mode": "off"},
        "hideFrom": {"legend": False, "tooltip": False, "viz": False},
    }  # fmt: skip


def _source() -> dict[str, Any]:
    return {
        "type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "refresh": 1,
        "regex": "", "multi": False, "includeAll": False, "current": {"text": "Prometheus", "value": "prometheus"},
        "options": [], "hide": 0, "skipUrlSync": False,
    }  # fmt: skip


def _variable(name: str, label: str, metric: str) -> dict[str, Any]:
    query = f"label_values({metric}, {name})"
    return {
        "type": "query", "name": name, "label": label, "datasource": SOURCE, "definition": query,
        "query": {"qryType": 1, "query": query, "refId": "PrometheusVariableQueryEditor-VariableQuery"}, "refresh": 2,
        "sort": 1, "multi": True, "includeAll": True, "allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]},
        "options": [], "regex": "", "hide": 0, "skipUrlSync": False,
    }  # fmt: skip


def text(dashboard: Dashboard) -> str:
    """Return a dashboard's file."""
    return json.dumps(built(dashboard), indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the files."""
    for dashboard in DASHBOARDS:
        (HERE / f"{dashboard.name}.json").write_text(text(dashboard), encoding="utf-8")
        sys.stdout.write(f"{dashboard.name}.json\n")


if __name__ == "__main__":
    main()
