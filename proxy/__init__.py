"""Strata, an OpenAI-compatible reverse proxy that makes every prompt cheap to repeat. This page is the map.

A chat request's life (`pipeline.Pipeline.handle`), and the value each step makes:

    read      bytes → core.request.Request    raw spans; only messages not met before are analysed (core.message)
    recall    → core.lineage.Recalled         the one read of memory, bounded in time (recall, memory)
              → core.known.Known              digests: the system prompt's lines, items that recur
    plan      → core.plan.Plan                pure: template → lineage → epoch → history (named) or recurring → recipe →
                                              remake (anonymous) → layers → guard, and why
    forward   Plan → core.render → bytes      to the upstream (forward, upstream) and back as it comes (relay, core.sse)
    record    → observe.record.Record         one, always, last; metrics, log line, receipt and memory are projections

The ideas have a page each in core:

    chain        each message's place, by which a conversation knows itself again
    lineage      which earlier requests one extends, what was forwarded for them; `known`, the same from digests alone
    epoch        a span in which a prompt only grows, and the policy that ends it; `profile`, a provider's prompt cache
    template     what of L1 is stable, over a tenant's lineages; `form`, in one lineage; `align`, line beside line
    library      L2, what stands in it and for whom; `reference`, what is named instead of repeated
    recurring    what an anonymous client sends again; `recipe` and `remake`, how its turns are put back
    window       what a windowed client left out
    guard        what a limit takes, cheapest loss first; `cut`, what it took; `budget`, the limit and its grid
    promotion    how all this makes a named conversation's prompt; `anonymous`, another's; `draft`, what comes of it
    prefix       what the prompt cache should hold; `divergence` and `cause`, why it did not

Everything that is no chat goes through `passthrough`; the proxy's own routes are in `admin`.

Who may import whom, outermost first (import-linter holds it):

    cli · demo · server · app · head   start and stop; the only builder of parts; `explaining`, `replaying` show
    replay · offline · capture         recorded traffic, planned as the pipeline does; live traffic, recorded
    pipeline | passthrough | admin | live   one request each; the live page
    forward · recall · weigh           parts of a chat request's way, round what is found out of it (`call`); `relay`
                                       passes the answer on, `meter` holds quotas, `summaries` are made beside it,
                                       `explain` says what would be done, `traces` holds the prompts before
    downstream | tenants | memo        the client's side, whose it is, what this process has found out
    observe | memory | upstream        the only packages that know prometheus_client, redis and httpx
    environment                        the only reader of the environment
    settings | background | ranks | prices   what can be set, tasks, the tokenizers' data, what models cost
    core                               pure: values in, values out; no clock, I/O, randomness or logging
    errors

`simulator` stands apart: a model provider with a prompt cache, for demo, tests and benchmarks.
"""
