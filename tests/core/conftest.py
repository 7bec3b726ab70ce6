"""One request read, planned and rendered as the pipeline does it, and a memory that holds what it would hold."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest

from proxy.core import plan, render, reply, request
from proxy.core.items import Tags
from proxy.core.lineage import NOTHING, Recalled, Stored
from proxy.core.models import describe
from proxy.core.plan import Plan
from proxy.core.request import Request
from proxy.memo import Analyst, TokenScale, count

ANALYST = Analyst(Tags.of(), max_bytes=16_000_000)
SCALE = TokenScale("o200k_base", max_bytes=16_000_000)


def as_bytes(body: object) -> bytes:
    return body if isinstance(body, bytes) else orjson.dumps(body)


def read_body(body: object) -> Request:
    return request.read(as_bytes(body), ANALYST.analyse, count)


def make_plan(
    body: object, memory: Recalled = NOTHING, *, named: bool = False, budget: int | None = None, **policy: Any
) -> tuple[Request, Plan]:
    found = read_body(body)
    settings = {"mode": "layered", "budget_tokens": budget, "reserve_tokens": 4_096, "over_budget": "forward", **policy}
    model = describe(found.model)
    return found, plan.make(found, memory, model=model, policy=plan.Policy(**settings), named=named, scale=SCALE)


def send(body: object, memory: Recalled = NOTHING, *, ask_usage: bool = False, **how: Any) -> bytes:
    found, made = make_plan(body, memory, **how)
    return render.body(found, made.draft, ask_usage=ask_usage)


class Talk:
    """A named conversation: `say` forwards a request, takes its answer and remembers what the pipeline would."""

    def __init__(self) -> None:
        self.turns: dict[bytes, tuple[Stored, ...]] = {}

    def say(self, body: object, answer: str = "Fine.", **how: Any) -> bytes:
        found, made = make_plan(body, Recalled(turns=dict(self.turns)), named=True, **how)
        newest = found.messages[made.draft.newest.start]
        brought = [block.item for text in newest.texts for block in text.blocks if block.item]
        replies = reply.of_answer(orjson.dumps({"choices": [{"message": {"content": answer}}]}))
        key = made.links[-1].key
        before = self.turns.get(key, ())
        stored = Stored(started=float(len(before)), items=(*found.hints.context, *brought), replies=frozenset(replies))
        self.turns[key] = (*before, stored)
        return render.body(found, made.draft, ask_usage=False)


@contextlib.contextmanager
def no_hang(seconds: int) -> Iterator[None]:
    """Fail what is still running after so long; only for what would else run for minutes."""

    def late(*_: object) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


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
