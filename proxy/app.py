"""The ASGI application: routes, and everything that is built at start and closed at the end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import secrets
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import FrameType

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from proxy.admin import Admin
from proxy.background import Background
from proxy.capture import Capture
from proxy.core.items import Tags
from proxy.core.price import Rates
from proxy.core.quota import Quotas, Verdict
from proxy.environment import SettingsError, load
from proxy.forward import Forwarder
from proxy.live.board import Board
from proxy.live.routes import Live
from proxy.memo import Analyst, count
from proxy.memory.calibrations import Calibrations
from proxy.memory.local import LocalStore
from proxy.memory.quotas import LocalCounting, RedisCounting
from proxy.memory.redis import RedisStore
from proxy.memory.store import Keys, Store
from proxy.meter import Meter
from proxy.observe.journal import Journal
from proxy.observe.log import Log
from proxy.observe.metrics import Metrics
from proxy.observe.warnings import Warnings
from proxy.passthrough import Passthrough
from proxy.pipeline import Pipeline
from proxy.prices import Prices
from proxy.recall import Recall
from proxy.settings import PREFIX, PriceSettings, Settings
from proxy.summaries import Summaries, price_at
from proxy.tenants import Tenants
from proxy.traces import Traces
from proxy.upstream.client import Clients, Timeouts
from proxy.upstream.target import is_chat, normal
from proxy.weigh import Weigher

_DRAIN_SECONDS = 2.0
_SECRET_SECONDS = 60.0
_GC_YOUNG = 20_000
"""A request makes some thousand objects and hardly a cycle: looking after every 700 is 5 % of its time."""
_SHARES = 32
"""Of `STRATA_MEMORY_BYTES`: 6 conversations, 2 what is learned, 2 the prompts before, 8 messages and tools as they were
analysed, 4 what was counted with each of two tokenizers, and 3 each of the prefixes as forwarded and as sent."""


class Services:
    """One process's parts, built inside its event loop."""

    def __init__(self, settings: Settings) -> None:
        loop = asyncio.get_running_loop()
        self.tenants = Tenants(settings)
        self.metrics = Metrics(self.tenants.names)
        self.log = Log(settings.log_level, later=lambda flush: loop.call_later(0.05, flush))
        self.background = Background(self._failed)
        self.journal = Journal()
        self.board = Board(lambda: self.tenants.names, now=time.time)
        self.clients = Clients(
            timeouts=Timeouts(
                connect=settings.connect_timeout_seconds,
                first_byte=settings.first_byte_timeout_seconds,
                idle=settings.idle_timeout_seconds,
            ),
            egress_proxy=settings.upstream_proxy.get_secret_value() if settings.upstream_proxy else None,
        )
        self._given = settings.secret.get_secret_value().encode() if settings.secret else None
        self._keys = Keys(self._given or secrets.token_bytes(32))
        self._shared: bytes | None = None
        self._again: asyncio.TimerHandle | None = None
        self.store = self._store(settings)
        self.prices = Prices(given_prices(settings))
        self._settings = self._begun_with = settings
        self.meter = Meter(
            RedisCounting(self.store) if isinstance(self.store, RedisStore) else LocalCounting(),
            owner=lambda tenant: self.keys().partition(tenant.quota_owner),
            closed=lambda: self._settings.quota_without_redis == "closed",
            told=self._quota,
            background=self.background,
        )
        calibrations = Calibrations(
            self.store if isinstance(self.store, RedisStore) else None,
            background=self.background,
            told=self.metrics.token_ratio,
        )
        token = settings.admin_token.get_secret_value() if settings.admin_token else None
        share = settings.memory_bytes // _SHARES
        traces = Traces(max_bytes=2 * share, ttl_seconds=settings.conversation_ttl_seconds)
        self.admin = Admin(
            tenants=self.tenants,
            store=self.store,
            traces=traces,
            keys=self.keys,
            metrics=self.metrics,
            journal=self.journal,
            token=token,
            debug=settings.debug,
        )
        self.ending = False
        self.live = Live(self.board, may=self.admin.may, ending=lambda: self.ending)
        self.capture = Capture(
            may=self.admin.may if token is not None else None, debug=settings.debug, ending=lambda: self.ending
        )
        analyst = Analyst(Tags.of(settings.context_tags), max_bytes=8 * share)
        weigher = Weigher(analyst, traces, memo_bytes=4 * share, ledger_bytes=3 * share)
        recall = Recall(self.store, analyst, self.background, scale=weigher.scale)
        self.pipeline = Pipeline(
            settings=settings,
            tenants=self.tenants,
            keys=self.keys,
            analyst=analyst,
            calibrations=calibrations,
            prices=self.prices,
            recall=recall,
            weigher=weigher,
            meter=self.meter,
            forwarder=Forwarder(
                self.clients, measure=weigher.weigh, streams=self.metrics.live_streams.inc, heard=recall.heard
            ),
            summaries=Summaries(
                clients=self.clients,
                store=self.store,
                meter=self.meter,
                background=self.background,
                price=price_at(self.prices.of),
                told=self.metrics.summary,
            ),
            sinks=(self.metrics.emit, self.log.emit, self.journal.emit, self.board.emit, Warnings(self.log.say).emit),
            taking=self.capture.take,
        )
        self.passthrough = Passthrough(
            settings=settings, tenants=self.tenants, clients=self.clients, meter=self.meter, prices=self.prices
        )

    def reload(self) -> None:
        """Read the settings again: tenants, quotas and all that is looked up by request change; streams go on."""
        try:
            settings = load()
        except SettingsError as error:
            self.log.say("error", "reload_failed", at=time.time(), error=str(error))
            return
        if self.tenants.names and not settings.tenants:
            why = "no tenants are left: anybody's key would be taken; restart to open the proxy"
            self.log.say("error", "reload_failed", at=time.time(), error=why)
            return
        fixed = [name for name in _FIXED if getattr(settings, name) != getattr(self._begun_with, name)]
        self._settings = settings
        self.tenants.take(settings)
        self.pipeline.take(settings)
        self.passthrough.take(settings)
        self.prices.take(given_prices(settings))
        self.background.start(asyncio.to_thread(self.prices.load, self.tenants.upstreams))
        needs = [PREFIX + name.upper() for name in fixed]
        self.log.say("warning" if needs else "info", "reloaded", at=time.time(), needs_a_restart=needs)

    def _quota(self, tenant: str, quotas: Quotas, verdict: Verdict | None) -> None:
        self.metrics.quota(tenant, quotas, verdict)
        self.board.quota(tenant, quotas, verdict)

    def keys(self) -> Keys:
        """Return the keys in force; they change once, when Redis tells the secret all replicas share."""
        return self._keys

    async def start(self) -> None:
        """Do what must be done before the first request."""
        await asyncio.to_thread(count, "")
        self.background.start(asyncio.to_thread(self.prices.load, self.tenants.upstreams))
        if self.tenants.any_quotas and not isinstance(self.store, RedisStore):
            self.log.say("warning", "quotas_are_this_process_own", at=time.time(), why="STRATA_REDIS_URL is not set")
        await self._share_secret()

    async def close(self) -> None:
        """Let what is under way be written, then let go."""
        if self._again is not None:
            self._again.cancel()
        await self.background.close(within=_DRAIN_SECONDS)
        await self.store.close()
        await self.clients.close()
        self.log.flush()

    def _store(self, settings: Settings) -> Store:
        ttl = settings.conversation_ttl_seconds
        share = settings.memory_bytes // _SHARES
        local = LocalStore(max_bytes=6 * share, ttl_seconds=ttl, clock=time.monotonic, book_bytes=2 * share)
        if settings.redis_url is None:
            return local
        return RedisStore(
            settings.redis_url.get_secret_value(),
            copy=local,
            ttl_seconds=ttl,
            on_error=self.metrics.store_error,
            on_state=self._store_changed,
        )

    async def _share_secret(self) -> None:
        """Take the secret that all replicas share, now and then: a Redis that lost it gets it back."""
        if self._given is not None or not isinstance(self.store, RedisStore):
            return
        shared = None if self.store.degraded else await self.store.secret(self._shared)
        if shared is not None and shared != self._shared:
            self._shared, self._keys = shared, Keys(shared)
        if self._again is not None:
            self._again.cancel()
        again = asyncio.get_running_loop().call_later
        self._again = again(_SECRET_SECONDS, lambda: self.background.start(self._share_secret()))

    def _store_changed(self, why: str | None) -> None:
        self.metrics.store_degraded.set(why is not None)
        if why is not None:
            self.log.say("warning", "store_degraded", at=time.time(), error=why)
            return
        self.log.say("info", "store_back", at=time.time())
        self.background.start(self._share_secret())

    def _failed(self, error: BaseException) -> None:
        self.log.say("error", "background_failed", at=time.time(), error=f"{type(error).__name__}: {error}")


_FIXED = (
    "host", "port", "workers", "redis_url", "secret", "memory_bytes", "context_tags", "connect_timeout_seconds",
    "first_byte_timeout_seconds", "idle_timeout_seconds", "shutdown_seconds", "log_level", "admin_token",
    "upstream_proxy", "env_file", "debug",
)  # fmt: skip
"""Settings that a running process cannot change."""


def given_prices(settings: Settings) -> dict[str, Rates]:
    """Return the prices that the settings give, by model."""
    return {name: _rates(price) for name, price in settings.prices.items()}


def _rates(given: PriceSettings) -> Rates:
    read, write = given.cached_read, given.cached_write
    return Rates(
        input=given.input,
        cached_read=given.input if read is None else read,
        cached_write=given.input if write is None else write,
        output=given.output,
    )


class Strata:
    """The application: paths of the proxy's own go to Starlette, all others straight to where they are proxied."""

    def __init__(self, own: Starlette) -> None:
        self.own = own

    @property
    def services(self) -> Services:
        """The parts of the running application."""
        services: Services = self.own.state.services
        return services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request, or the lifespan."""
        if scope["type"] != "http" or scope["path"].startswith(_OWN) or scope["path"] == "/strata":
            await self.own(scope, receive, send)
        elif scope["method"] == "POST" and is_chat(normal(scope["raw_path"])):
            await self.services.pipeline.handle(scope, receive, send)
        else:
            await self.services.passthrough.handle(scope, receive, send)


_OWN = ("/livez", "/readyz", "/metrics", "/strata/")


def from_environment() -> Strata:
    """Return the application of a worker process."""
    return create(load())


def create(settings: Settings) -> Strata:
    """Return the application for these settings."""

    @contextlib.asynccontextmanager
    async def lifespan(own: Starlette) -> AsyncIterator[None]:
        services = own.state.services = Services(settings)
        own.router.routes += _routes(services.admin, services.pipeline, services.live, services.capture)
        await services.start()
        if threading.current_thread() is threading.main_thread():
            _hear(services)
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_YOUNG)
        try:
            yield
        finally:
            await services.close()

    return Strata(Starlette(lifespan=lifespan))


HUP = frozenset({signal.SIGHUP} if hasattr(signal, "SIGHUP") else ())


def hold_hup() -> None:
    """Let SIGHUP wait until somebody hears it, here and in processes that this one starts."""
    if HUP:
        signal.pthread_sigmask(signal.SIG_BLOCK, HUP)


def _hear(services: Services) -> None:
    """Hear the process's signals: SIGHUP, and those that end it, which the server answers as before.

    A worker whose parent is gone, which nobody could stop or replace, ends as if it had been told to.
    """
    loop = asyncio.get_running_loop()
    if HUP:
        loop.add_signal_handler(signal.SIGHUP, services.reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HUP)
    if (parent := multiprocessing.parent_process()) is not None:

        def orphaned() -> None:
            loop.remove_reader(parent.sentinel)
            signal.raise_signal(signal.SIGTERM)

        loop.add_reader(parent.sentinel, orphaned)
    for number in (signal.SIGTERM, signal.SIGINT):
        answer = signal.getsignal(number)

        def ended(given: int, frame: FrameType | None, answer: object = answer) -> None:
            services.ending = True
            if callable(answer):
                answer(given, frame)

        if callable(answer):
            signal.signal(number, ended)


class _Raw:
    """An ASGI handler as a route's endpoint."""

    def __init__(self, handle: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handle(scope, receive, send)


def _routes(admin: Admin, pipeline: Pipeline, live: Live, capture: Capture) -> list[Route]:
    return [
        Route("/livez", admin.livez),
        Route("/readyz", admin.readyz),
        Route("/metrics", admin.metrics),
        Route("/strata/", live.page),
        Route("/strata/state", live.state),
        Route("/strata/events", live.events),
        Route("/strata/capture", capture.stream),
        Route("/strata/requests/{id}", admin.request),
        Route("/strata/explain", _Raw(pipeline.explain), methods=["POST"]),
        Route("/strata/conversations/{id:path}", admin.conversation, methods=["GET", "DELETE"]),
    ]
