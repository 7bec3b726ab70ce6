"""What Strata would do with a request, and why: the whole plan told, nothing forwarded and nothing remembered.

`POST /strata/explain` with the body and headers of a chat request → its layers, decisions, prediction, the bytes that
would be forwarded, and where they differ from the prompt before in the same lineage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from proxy.call import Call
from proxy.core import render
from proxy.core.divergence import Break
from proxy.core.plan import Plan
from proxy.core.request import Request
from proxy.observe import log

_ACTIONS = {
    "library_outlined": "items in L2 stand as outlines: the prompt is over its limit",
    "outputs_shortened": "old tool outputs keep head and tail: the prompt is over its limit",
    "turns_dropped": "the oldest turns are left out: the prompt is over its limit",
    "exchanges_dropped": "the oldest tool exchanges of the newest turn are left out: the prompt is over its limit",
    "replies_shortened": "long old replies keep head and tail: the prompt is over its limit",
    "context_packed": "what strata.context brings is packed: the prompt is over its limit",
    "library_left_out": "L2 is left out: the prompt is over its limit",
    "forwarded_over_budget": "nothing more may be taken: it is forwarded over its limit",
    "rejected": "nothing more may be taken: it is refused (STRATA_OVER_BUDGET=reject)",
}
_BEGAN = {
    "first": "an epoch begins: the first of this conversation",
    "limit": "an epoch begins: the one before has reached the limit",
    "l1_changed": "an epoch begins: the system prompt has changed",
    "tools_changed": "an epoch begins: the tools have changed",
    "dead_weight": "an epoch begins: what the one before carries for nothing costs more than one re-read",
    "cold": "an epoch begins: the prompt cache is cold, and compaction takes away more than it re-reads",
}


def told(call: Call) -> dict[str, object]:
    """Return what is told of a request that was planned and weighed."""
    request, made = call.request, call.plan
    if request is None or made is None:
        return {"object": "explanation", "mode": call.tenant.policy.mode, "decisions": [f"bypass: {call.cause}"]}
    body = render.body(request, made.draft, ask_usage=request.stream and request.wants_usage is False)
    return {
        "object": "explanation",
        "tenant": call.tenant.name,
        "mode": call.tenant.policy.mode,
        "model": request.model,
        "conversation": call.name.id if call.name else None,
        "changed": body != request.body,
        "total_tokens": call.layers.total if call.layers else None,
        "limit_tokens": made.limit,
        "layers": [
            {"layer": layer.name, "tokens": layer.tokens, "sha256": layer.sha256}
            for layer in (call.layers.each if call.layers else ())
            if layer.tokens
        ],
        "messages": list(_messages(call, request, made)),
        "decisions": list(_decisions(call, made)),
        "prediction": {
            "cached_tokens": call.predicted_tokens,
            "as_sent_cached_tokens": call.as_sent_tokens,
            "as_sent_tokens": _as_sent(call),
        },
        "divergence": _diff(call.divergence),
        "forwarded": body.decode("utf-8", "replace"),
        "forwarded_sha256": hashlib.sha256(body).hexdigest(),
    }


def _as_sent(call: Call) -> int | None:
    """Weigh the client's own prompt as the receipt does, of an upstream that counts as Strata does."""
    messages, forwarded = call.as_sent_input_tokens, sum(step.tokens for step in call.steps)
    if not messages or not forwarded or call.layers is None:
        return messages
    # What primes the reply is in no message.
    return round(messages * call.layers.total / forwarded)


def _diff(found: Break | None) -> dict[str, object] | None:
    return None if found is None else {**log.told(found), "was": found.was, "now": found.now}


def _messages(call: Call, request: Request, made: Plan) -> Iterator[dict[str, object]]:
    """Say of each message of the client's what becomes of it."""
    draft = made.draft
    pieces = {piece.index: piece for piece in call.trace.pieces if piece.index is not None} if call.trace else {}
    for index, message in enumerate(request.messages):
        told: dict[str, object] = {"message": index, "role": message.role}
        if not draft.keeps(index):
            yield {**told, "what": "left out"}
            continue
        piece = pieces.get(index)
        told |= {"layer": piece.layer, "tokens": piece.tokens} if piece else {}
        what = "as sent"
        if index in draft.cut.shortened:
            what = "shortened to head and tail"
        elif index in draft.forms:
            what = "as it was forwarded before"
        elif index in draft.changes:
            what = "changed"
        yield {**told, "what": what}


def _decisions(call: Call, made: Plan) -> Iterator[str]:
    draft = made.draft
    if made.epoch is not None:
        yield _BEGAN[made.began] if made.began else f"epoch {made.epoch.number} goes on"
    if draft.tools:
        yield "tools stand in the order in which they were first seen"
    for item in draft.referenced:
        yield f"{item.label} ({item.tag}) stands earlier: a line refers to it"
    for item in draft.library.items:
        yield f"{item.label} ({item.tag}) stands in L2" + (", as an outline" if item.partial else "")
    if made.current.slots:
        yield f"{len(made.current.slots)} lines of the system prompt that change are told before the user's words"
    if made.formed and (behind := made.formed.behind):
        yield f"{behind} lines of the system prompt are this conversation's own, and stand behind what all share"
    if call.kept_messages:
        yield f"{call.kept_messages} messages that the client has left out are put in front"
    for action in made.actions:
        yield _ACTIONS[action]
    if call.degraded:
        yield "memory is degraded: Redis does not answer"
