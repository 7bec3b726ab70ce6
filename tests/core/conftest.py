"""One request read, planned and rendered as the pipeline does it, and a memory that holds what it would hold."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from proxy.core import plan, render, reply, request
from proxy.core.items import Tags
from proxy.core.lineage import NOTHING, Recalled
from proxy.core.models import describe
from proxy.core.plan import Plan
from proxy.core.policy import Policy
from proxy.core.request import Request
from proxy.memo import Analyst, TokenScale, count
from proxy.memory.local import LocalStore
from proxy.recall import log_entries

ANALYST = Analyst(Tags.of(), max_bytes=16_000_000)
SCALE = TokenScale("o200k_base", max_bytes=16_000_000)


def as_bytes(body: object) -> bytes:
    return body if isinstance(body, bytes) else orjson.dumps(body)


def read_body(body: object) -> Request:
    return request.read(as_bytes(body), ANALYST.analyse, count)


def make_plan(
    body: object,
    memory: Recalled = NOTHING,
    *,
    named: bool = False,
    budget: int | None = None,
    now: float = 0.0,
    **policy: Any,
) -> tuple[Request, Plan]:
    found = read_body(body)
    settings = {"mode": "layered", "budget_tokens": budget, "reserve_tokens": 4_096, "over_budget": "forward", **policy}
    made = plan.make(
        found,
        memory,
        model=describe(found.model),
        policy=Policy(**settings),
        named=named,
        scale=SCALE,
        look=ANALYST.analyse,
        now=now,
        given=ANALYST.tools(found.member("tools")),
    )
    return found, made


def send(body: object, memory: Recalled = NOTHING, *, ask_usage: bool = False, **how: Any) -> bytes:
    found, made = make_plan(body, memory, **how)
    return render.body(found, made.draft, ask_usage=ask_usage)


class Talk:
    """A named conversation: `say` forwards a request, takes its answer and remembers what the pipeline would.

    Each request comes a second after the one before, or at `now`. `plans` are all that were made.
    """

    def __init__(self) -> None:
        self.store = LocalStore(max_bytes=64_000_000, ttl_seconds=1e9, clock=lambda: 0.0)
        self.now = 0.0
        self.plans: list[Plan] = []

    @property
    def recalled(self) -> Recalled:
        return self.store.copy("c")

    def say(self, body: object, answer: str | None = "Fine.", *, now: float | None = None, **how: Any) -> bytes:
        """Forward one request; an `answer` of None is one that never came."""
        self.now = self.now + 1 if now is None else now
        found, made = make_plan(body, self.recalled, named=True, now=self.now, **how)
        self.plans.append(made)
        entries = log_entries(found, made, at=self.now) if made.places else {}
        self.store.put("c", list(entries.values()), made.epoch if made.began else None)
        entry = entries.get(made.draft.newest.start)
        if entry is not None and answer is not None:
            replies = reply.of_answer(orjson.dumps({"choices": [{"message": {"content": answer}}]}))
            self.store.answer("c", entry, replies)
        return render.body(found, made.draft, ask_usage=False)


@contextlib.contextmanager
def no_hang(seconds: int) -> Iterator[None]:
    """Fail what has worked for so long; only for what would else run for minutes.

    In seconds of this process's own work: what else the machine does is no fault of the core.
    """

    def late(*_: object) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.fixture(scope="session")
def read() -> Callable[[object], Request]:
    return read_body


@pytest.fixture(scope="session")
def make() -> Callable[..., tuple[Request, Plan]]:
    return make_plan


@pytest.fixture(scope="session")
def forward() -> Callable[..., bytes]:
    return send


@pytest.fixture(scope="session")
def talk() -> Callable[[], Talk]:
    return Talk


@pytest.fixture(scope="session")
def scale() -> TokenScale:
    return SCALE


@pytest.fixture(scope="session")
def guard() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    return no_hang
