"""What a call's prompt weighs, what the prompt cache should hold of it, and where it differs from the one before.

What is forwarded depends on none of it: it is found out while the upstream works.
"""

from __future__ import annotations

import asyncio
import contextlib

from proxy.call import Call
from proxy.core import divergence, lineage, measure, prefix
from proxy.core.draft import Draft
from proxy.core.models import Encoding, Model
from proxy.core.plan import Plan
from proxy.core.prefix import Ledger
from proxy.core.request import Request
from proxy.memo import Analyst, TokenScale
from proxy.traces import ROOT, Traces


class Weigher:
    """Holds the scales, and what was forwarded before: in steps, of which `ledger_bytes` are kept, and as traces."""

    def __init__(self, analyst: Analyst, traces: Traces, *, memo_bytes: int, ledger_bytes: int) -> None:
        self._analyst = analyst
        self._traces = traces
        self._memo_bytes = memo_bytes
        self._scales: dict[Encoding, TokenScale] = {}
        self._forwarded, self._sent = Ledger(max_bytes=ledger_bytes), Ledger(max_bytes=ledger_bytes)

    async def scale(self, model: Model) -> TokenScale:
        """Return the scale of a model; a tokenizer's data is loaded when it is first asked for."""
        encoding = model.encoding
        if encoding not in self._scales:
            made = await asyncio.to_thread(TokenScale, encoding, max_bytes=self._memo_bytes)
            self._scales.setdefault(encoding, made)
        return self._scales[encoding].of(model.media)

    def weigh(self, call: Call, *, notes: bool = True) -> None:
        """Weigh a call's layers, predict and compare; `notes` that its client has sent these bytes."""
        if call.request is None or call.plan is None or call.layers is not None:
            return
        scale = self._scales[call.model.encoding].of(call.model.media)
        with contextlib.suppress(LookupError, ValueError, TypeError, ArithmeticError, RuntimeError):
            call.layers = measure.layers(call.request, call.plan.draft, scale)
            call.losses = measure.losses(call.request, call.plan.draft, scale)
            call.referenced_tokens = sum(scale.text(item.content) for item in call.plan.draft.referenced)
            self._predict(call, call.request, call.plan.draft, scale, notes=notes)
            self._compare(call, call.request, call.plan, scale)

    def forwarded(self, call: Call) -> None:
        """Note that the upstream has read a call's prompt."""
        if not call.steps:
            return
        self._forwarded.forward(_start(call), call.steps, now=call.at)
        if call.trace is not None:
            self._traces.put(call.trace, call.lineage, of=call.conversation, ttl_seconds=call.tenant.ttl_seconds)

    def _predict(self, call: Call, request: Request, draft: Draft, scale: TokenScale, *, notes: bool) -> None:
        """Say what the prompt cache should hold of this prompt, and would have held of the client's own."""
        start, profile = _start(call), call.policy.profile
        call.steps = prefix.forwarded(request, draft, scale, self._analyst.chunks)
        sent = call.sent if call.sent is not request else None
        own = prefix.as_sent(request, draft, scale, self._analyst.chunks, sent=sent) or call.steps
        call.as_sent_input_tokens = sum(step.tokens for step in own)
        call.predicted_tokens = self._forwarded.cached(start, call.steps, now=call.at, profile=profile)
        call.as_sent_tokens = self._sent.cached(start, own, now=call.at, profile=profile)
        if notes:
            self._sent.forward(start, own, now=call.at)

    def _compare(self, call: Call, request: Request, made: Plan, scale: TokenScale) -> None:
        """Find where the prompt differs from the one before in its lineage."""
        parts, places = request.parts, request.places
        if not call.tenant.remember_content or not parts.turns:
            return
        call.trace = divergence.trace(request, made.draft, scale, at=call.at)
        here = call.spot(places[-1])
        earlier = [call.spot(place) for place in lineage.earlier(request)]
        # A history that was edited is found by its name, or by how its conversation begins.
        root = call.spot(places[parts.leading]) + ROOT
        names = (call.conversation.encode(), root) if call.conversation else (root,)
        call.lineage = (here, *names)
        call.before = self._traces.before(call.trace, [here, *earlier], names if len(parts.turns) > 1 else ())
        if call.before is not None:
            call.divergence = divergence.divergence(call.before, call.trace, made.began)


def _start(call: Call) -> int:
    """What separates prompt caches: whose key it is, and the model."""
    return hash((call.partition, call.request.model if call.request else ""))
