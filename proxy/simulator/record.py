"""What the provider remembers: every request it got, its totals, its cache and its files."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from decimal import Decimal
from hashlib import sha256
from itertools import count
from typing import Literal, TypeVar

import orjson
from starlette.datastructures import Headers

from proxy.simulator.accounting import OPENAI, Charge, PromptCache, Rules, cost
from proxy.simulator.faults import FaultQueue

Item = TypeVar("Item")
Outcome = Literal["pending", "complete", "client_gone", "fault"]

MODELS = (
    "gpt-5.1",
    "gpt-4.1",
    "gpt-4o-mini",
    "openai/gpt-oss-120b",
    "text-embedding-3-small",
    "text-embedding-3-large",
    "omni-moderation-latest",
    "whisper-1",
    "tts-1",
)
_KEPT_OBJECTS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the provider behaves. Times are in seconds; any model name is answered, listed or not."""

    rules: Rules = OPENAI
    first_token_seconds: float = 0.0
    seconds_per_uncached_token: float = 0.0
    event_seconds: float = 0.0
    reply_words: int = 40
    model_list: tuple[str, ...] = MODELS
    keep_bodies: bool = True
    """Without bodies an entry still has their size and digest."""
    keep_requests: int = 10_000
    clock: Callable[[], float] = time.monotonic
    """Time of the cache's lifetimes only; waiting is always real."""
    strict: bool = False
    """Refuse unknown and later fields (``stream_options`` too), and system messages after the first position."""
    keys: frozenset[str] | None = None
    max_context_tokens: int | None = None


@dataclass(slots=True, kw_only=True)
class Entry:
    """One request as it arrived, and what became of it; filled in while it is answered."""

    index: int
    method: str
    path: str
    raw_path: str
    query: str
    headers: Headers
    key: str
    body: bytes = b""
    body_bytes: int = 0
    body_sha256: str = ""
    fault: str = ""
    status: int | None = None
    charge: Charge | None = None
    completion_tokens: int = 0
    events: int = 0
    outcome: Outcome = "pending"
    """``fault`` also for a stream that a fault cut; a plain error reply is ``complete``."""

    @property
    def request_id(self) -> str:
        """Value of this request's ``x-request-id``."""
        return f"req_sim{self.index:08d}"

    @property
    def json(self) -> object:
        """Parsed body; raises `orjson.JSONDecodeError` when it is none."""
        return orjson.loads(self.body)

    def receive(self, body: bytes, *, keep: bool) -> None:
        """Take in the body, or only its measure."""
        self.body = body if keep else b""
        self.body_bytes = len(body)
        self.body_sha256 = sha256(body).hexdigest()

    def summary(self) -> dict[str, object]:
        """Projection for ``/sim/requests``; never shows the key."""
        return {
            "id": self.request_id,
            "method": self.method,
            "path": self.raw_path,
            "query": self.query,
            "status": self.status,
            "outcome": self.outcome,
            "fault": self.fault,
            "body_bytes": self.body_bytes,
            "body_sha256": self.body_sha256,
            "prompt_tokens": self.charge.prompt_tokens if self.charge else None,
            "cached_tokens": self.charge.cached_tokens if self.charge else None,
            "completion_tokens": self.completion_tokens,
            "events": self.events,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over all requests since the start or the last reset, kept in `Simulator.requests` or not."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    usd: Decimal = Decimal(0)

    @property
    def cached_share(self) -> float:
        """Cached part of all prompt tokens, from 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """An uploaded file; ``raw`` is the whole multipart body it came in."""

    id: str
    filename: str
    purpose: str
    content_type: str
    content: bytes
    raw: bytes
    created_at: int


class Simulator:
    """The provider's state; reach it as ``app.state.simulator`` to read requests and to queue faults."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.requests: deque[Entry] = deque(maxlen=options.keep_requests)
        self.faults = FaultQueue()
        self.cache = PromptCache(options.rules)
        self.files: OrderedDict[str, StoredFile] = OrderedDict()
        self.conversations: OrderedDict[str, tuple[object, ...]] = OrderedDict()
        self._indexes = count(1)
        self._totals = Totals()

    @property
    def totals(self) -> Totals:
        """Sums so far."""
        return self._totals

    def open(self, entry: Entry) -> None:
        """Keep a new request."""
        self.requests.append(entry)
        self._totals = replace(self._totals, requests=self._totals.requests + 1)

    def next_index(self) -> int:
        """Number of the next request, from 1 and never repeated."""
        return next(self._indexes)

    def charge(self, entry: Entry, prompts: Iterable[Iterable[int]], *, partition: str) -> Charge:
        """Account for the prompts of one request, in order."""
        now = self.options.clock()
        parts = [self.cache.charge(tokens, now=now, partition=partition) for tokens in prompts]
        charge = Charge(
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            cached_tokens=sum(part.cached_tokens for part in parts),
        )
        entry.charge = charge
        self._add(charge.prompt_tokens, charge.cached_tokens, 0)
        return charge

    def generated(self, entry: Entry, tokens: int) -> None:
        """Account for the reply of one request."""
        entry.completion_tokens += tokens
        self._add(0, 0, tokens)

    def reset(self) -> None:
        """Forget all requests, faults, files, conversations and cached blocks; indexes go on."""
        self.requests.clear()
        self.faults.clear()
        self.cache.clear()
        self.files.clear()
        self.conversations.clear()
        self._totals = Totals()

    def _add(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        before = self._totals
        usd = cost(
            self.options.rules,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            completion_tokens=completion_tokens,
        )
        self._totals = replace(
            before,
            prompt_tokens=before.prompt_tokens + prompt_tokens,
            cached_tokens=before.cached_tokens + cached_tokens,
            completion_tokens=before.completion_tokens + completion_tokens,
            usd=before.usd + usd,
        )


def shelve(shelf: OrderedDict[str, Item], key: str, item: Item) -> None:
    """Keep an item, dropping the oldest when the shelf is full."""
    shelf[key] = item
    while len(shelf) > _KEPT_OBJECTS:
        shelf.popitem(last=False)
