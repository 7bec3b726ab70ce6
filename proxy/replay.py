"""`strata replay`: what recorded traffic cost its prompt cache, why, and what it would have cost in layers. Offline.

A line is a chat request's body, `{"model": …, "messages": […]}`, or `{"body": {…}, "at": 1795993200.5, "conversation":
"c1", "usage": {…}}`; with `whole` a line is a conversation, `{"conversation": …, "messages": […]}`, of which every
prefix up to a user or tool message was a request. Files of any size: a line at a time, memory bounded.
"""

from __future__ import annotations

import codecs
import collections
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated

import msgspec

from proxy.core import divergence, layers
from proxy.core import usage as usages
from proxy.core.cause import attribute
from proxy.core.draft import Draft, Slot
from proxy.core.items import BUILTIN, Tags
from proxy.core.models import NO_WINDOWS, OTHER, describe
from proxy.core.policy import Policy
from proxy.core.prefix import Ledger, Step
from proxy.core.price import Amount, Price, cost
from proxy.core.profile import Profile
from proxy.core.request import Request
from proxy.errors import Odd, StrataError
from proxy.memo import TokenScale
from proxy.offline import Offline, Planned
from proxy.traces import Traces

_GAP_SECONDS = 5.0
"""Between requests that say no time."""
_MOST_CONVERSATIONS = 100_000
_LATEST_SECONDS = 1e11
_WORST = 10
_MOST_MODELS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One request of the traffic. `usage` is what was reported for it, as JSON; empty where nothing was."""

    body: bytes
    at: float
    conversation: str | None = None
    usage: bytes = b""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    """What could not be played, and why."""

    why: str
    count: int = 1


@dataclass(slots=True)
class Sums:
    """Tokens and money of one way of sending the traffic. `usd` is of the prompts that have a price."""

    input_tokens: int = 0
    cached_tokens: int = 0
    usd: Decimal = Decimal(0)
    causes: collections.Counter[str] = field(default_factory=collections.Counter)

    @property
    def uncached_tokens(self) -> int:
        """What was read at full price."""
        return self.input_tokens - self.cached_tokens

    @property
    def cached_share(self) -> float | None:
        """Of all prompt tokens."""
        return self.cached_tokens / self.input_tokens if self.input_tokens else None


@dataclass(slots=True)
class Report:
    """What a replay found. `worst` are conversations by uncached tokens: as sent, and in layers.

    `recorded` is what was reported, for `reported` of the requests; `recorded_as_sent` is ours of the same ones.
    """

    requests: int = 0
    skipped: collections.Counter[str] = field(default_factory=collections.Counter)
    reported: int = 0
    recorded: Sums = field(default_factory=Sums)
    recorded_as_sent: Sums = field(default_factory=Sums)
    as_sent: Sums = field(default_factory=Sums)
    layered: Sums = field(default_factory=Sums)
    unpriced: int = 0
    breaks: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    models: dict[str, tuple[Sums, Sums]] = field(default_factory=dict)
    conversations: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def worst(self) -> list[tuple[str, int, int]]:
        """The conversations that read most at full price, as sent."""
        found = [(name, own, mine) for name, (own, mine) in self.conversations.items()]
        return sorted(found, key=lambda each: -each[1])[:_WORST]

    def told(self) -> dict[str, object]:
        """Return the report as JSON has it."""
        return {
            "requests": self.requests,
            "skipped": dict(self.skipped),
            "reported_requests": self.reported,
            "recorded": _sums(self.recorded) if self.reported else None,
            "as_sent": _sums(self.as_sent),
            "layered": _sums(self.layered),
            "unpriced_requests": self.unpriced,
            "breaks": [
                {"layer": layer, "kind": kind, "count": count} for (layer, kind), count in self.breaks.most_common()
            ],
            "models": {
                name: {"as_sent": _sums(own), "layered": _sums(mine)} for name, (own, mine) in self.models.items()
            },
            "worst_conversations": [
                {"conversation": name, "as_sent_uncached_tokens": own, "layered_uncached_tokens": mine}
                for name, own, mine in self.worst
            ],
        }


def _sums(sums: Sums) -> dict[str, object]:
    return {
        "input_tokens": sums.input_tokens,
        "cached_tokens": sums.cached_tokens,
        "uncached_tokens": sums.uncached_tokens,
        "cached_share": sums.cached_share,
        "usd": float(sums.usd),
        "causes": dict(sums.causes),
    }


class _Line(msgspec.Struct):
    body: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    at: Annotated[float, msgspec.Meta(ge=0, lt=1e20)] | None = None
    conversation: str | None = None
    usage: msgspec.Raw = msgspec.Raw(b"")
    left_out: int | None = None


class _Said(msgspec.Struct):
    role: str = ""


class _Named(msgspec.Struct):
    metadata: dict[str, object] | None = None
    model: str = ""


def lines(
    file: Iterable[bytes], *, read: Callable[[int], None], whole: bool, model: str, now: float
) -> Iterator[Recorded | Skipped]:
    """Read traffic, a line at a time; what is no request says why. `read` is told how many bytes were taken.

    What says no time comes five seconds after what was before it; the first at `now`.
    """
    at = now
    for number, raw in enumerate(file):
        read(len(raw))
        raw = raw.removeprefix(codecs.BOM_UTF8) if number == 0 else raw  # noqa: PLW2901 -- the same line
        if not raw.strip():
            continue
        try:
            line = msgspec.json.decode(raw, type=_Line)
        except msgspec.ValidationError as error:
            yield Skipped(str(error))
            continue
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield Skipped("no JSON object")
            continue
        if line.left_out is not None:
            if line.left_out > 0:
                yield Skipped("left out of the capture, which was not read fast enough", line.left_out)
            continue
        if whole:
            for found in _requests(line, at, model):
                at = found.at if isinstance(found, Recorded) else at
                yield found
            continue
        body = bytes(line.body) or raw.strip()
        at = _seconds(line.at) if line.at is not None else at + _GAP_SECONDS
        yield Recorded(
            body=body,
            at=at,
            conversation=line.conversation or _conversation(body),
            usage=bytes(line.usage),
            model=model,
        )


def _seconds(at: float) -> float:
    """Return a time in seconds; it may have been written in milli-, micro- or nanoseconds."""
    while at > _LATEST_SECONDS:
        at /= 1_000
    return at


def _requests(line: _Line, at: float, model: str) -> Iterator[Recorded | Skipped]:
    """Return every request of a conversation that was recorded whole."""
    try:
        messages = msgspec.json.decode(bytes(line.messages) or b"null", type=list[msgspec.Raw])
        roles = [msgspec.json.decode(message, type=_Said).role for message in messages]
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        yield Skipped("no conversation: messages")
        return
    for end, role in enumerate(roles, 1):
        if role in {"user", "tool"} and (end == len(roles) or roles[end] == "assistant"):
            at += _GAP_SECONDS
            body = msgspec.json.encode({"model": model, "messages": messages[:end]})
            yield Recorded(body=body, at=at, conversation=line.conversation)


def _conversation(body: bytes) -> str | None:
    try:
        metadata = msgspec.json.decode(body, type=_Named).metadata or {}
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    names = (metadata.get(key) for key in ("conversation_id", "session_id", "thread_id", "chat_id"))
    return next((name for name in names if isinstance(name, str) and name), None)


class Replay:
    """Plays traffic as sent and in layers, each against a prompt cache by the profile's rules."""

    def __init__(
        self,
        policy: Policy,
        scale: TokenScale,
        *,
        price: Callable[[str, float], Price | None],
        max_bytes: int,
        tags: Tags = BUILTIN,
        windows: Mapping[str, int] = NO_WINDOWS,
    ) -> None:
        self._profile: Profile = policy.profile
        self._scale = scale
        self._price = price
        self._offline = Offline(policy, scale, max_bytes=max_bytes, tags=tags, windows=windows)
        self._cache, self._own_cache = Ledger(max_bytes=max_bytes), Ledger(max_bytes=max_bytes)
        self._traces = Traces(max_bytes=max_bytes, ttl_seconds=math.inf)
        self.report = Report()

    def play(self, traffic: Iterable[Recorded | Skipped]) -> Report:
        """Play all of it."""
        for each in traffic:
            if isinstance(each, Skipped):
                self.report.skipped[each.why] += each.count
                continue
            try:
                found = self._offline.plan(each.body, at=each.at, name=each.conversation)
            except (StrataError, Odd) as error:
                self.report.skipped[error.fault.code if isinstance(error, StrataError) else error.cause] += 1
                continue
            self._take(each, found)
        return self.report

    def _take(self, each: Recorded, found: Planned) -> None:
        report = self.report
        report.requests += 1
        model = found.sent.model or each.model
        start = hash(model)
        own = self._cached(self._own_cache, start, found.own, each.at)
        mine = self._cached(self._cache, start, found.steps, each.at)
        totals = sum(step.tokens for step in found.own), sum(step.tokens for step in found.steps)
        price = self._price(model, each.at)
        report.unpriced += price is None
        label = describe(model).name
        by_model = report.models.setdefault(
            model if label == OTHER and len(report.models) < _MOST_MODELS else label, (Sums(), Sums())
        )
        for sums, total, cached in (
            (report.as_sent, totals[0], own), (report.layered, totals[1], mine),
            (by_model[0], totals[0], own), (by_model[1], totals[1], mine),
        ):  # fmt: skip
            _add(sums, total, cached, price)
        self._explain(each, found, own)
        self._record(each, totals[0], own, price)
        name = each.conversation
        if name and (name in report.conversations or len(report.conversations) < _MOST_CONVERSATIONS):
            before = report.conversations.get(name, (0, 0))
            report.conversations[name] = (before[0] + totals[0] - own, before[1] + totals[1] - mine)

    def _cached(self, cache: Ledger, start: int, steps: tuple[Step, ...], at: float) -> int:
        held = cache.cached(start, steps, now=at, profile=self._profile)
        cache.forward(start, steps, now=at)
        return held

    def _explain(self, each: Recorded, found: Planned, cached: int) -> None:
        """Say why the client's own bytes were not read from the prompt cache."""
        request = found.sent
        now = divergence.trace(request, _as_sent(request), self._scale, at=each.at)
        named = (each.conversation.encode("utf-8", "surrogatepass"),) if each.conversation else ()
        names = (*named, found.root)
        before = self._traces.before(now, [found.here, *found.earlier], names if len(request.parts.turns) > 1 else ())
        self._traces.put(now, (found.here, *names))
        broke = divergence.divergence(before, now) if before else None
        if broke is not None:
            self.report.breaks[broke.layer, broke.kind] += 1
        self.report.as_sent.causes.update(
            attribute(
                total=sum(step.tokens for step in found.own),
                cached=cached,
                counted=now.tokens,
                before=before,
                found=broke,
                idle_seconds=each.at - before.at if before else None,
                profile=self._profile,
                predicted=cached,
            )
        )

    def _record(self, each: Recorded, total: int, cached: int, price: Price | None) -> None:
        """Add what was reported for the request itself."""
        usage = usages.parse(b'{"usage":' + each.usage + b"}") if each.usage else None
        if usage is not None:
            self.report.reported += 1
            _add(self.report.recorded_as_sent, total, cached, price)
            _add(self.report.recorded, usage.input_tokens, usage.cache_read_tokens or 0, price)


def _add(sums: Sums, total: int, cached: int, price: Price | None) -> None:
    sums.input_tokens += total
    sums.cached_tokens += cached
    if price is not None:
        sums.usd += cost(price, Amount(input=total, cached_read=cached))


def _as_sent(request: Request) -> Draft:
    return layers.arrange([Slot(message, fixed=True) for message in request.messages], request.parts)
