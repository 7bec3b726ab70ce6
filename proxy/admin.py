"""The proxy's own routes: is it alive, its metrics, and what it knows of a conversation."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from proxy.downstream import JSON, error_body
from proxy.errors import NO_MEMORY, NOT_FOUND, UNKNOWN_KEY, Fault, StrataError
from proxy.memory.store import Keys, Store, Unavailable
from proxy.observe import log
from proxy.observe.journal import Journal
from proxy.observe.metrics import Metrics
from proxy.tenants import Tenants
from proxy.traces import Traces


class Admin:
    """Handlers as Starlette wants them."""

    def __init__(
        self,
        *,
        tenants: Tenants,
        store: Store,
        traces: Traces,
        keys: Callable[[], Keys],
        metrics: Metrics,
        journal: Journal,
        token: str | None,
        debug: bool,
    ) -> None:
        self._tenants = tenants
        self._store = store
        self._traces = traces
        self._keys = keys
        self._metrics = metrics
        self._journal = journal
        self._token = token
        self._debug = debug

    def may(self, request: Request) -> bool:
        """Whether a request bears the admin token, or none is set."""
        return self._token is None or _bears(request, self._token)

    async def livez(self, _: Request) -> Response:
        """Answer while the process runs."""
        return PlainTextResponse("ok\n")

    async def readyz(self, _: Request) -> Response:
        """Say whether requests are served; without Redis they are, with less memory."""
        state = "degraded" if self._store.degraded else "ok"
        return _json({"status": "ready", "store": state})

    async def metrics(self, request: Request) -> Response:
        """Expose Prometheus's text, behind the admin token when one is set."""
        if not self.may(request):
            return PlainTextResponse(
                "401: /metrics needs the admin token: Authorization: Bearer <STRATA_ADMIN_TOKEN>\n",
                status_code=401,
                headers={"www-authenticate": "Bearer"},
            )
        body, kind = await self._metrics.expose(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    async def request(self, request: Request) -> Response:
        """Tell what is known of one request, to the key that made it or the admin: `GET /strata/requests/{id}`."""
        found = self._journal.find(request.path_params["id"])
        if found is not None and not (self._token is not None and _bears(request, self._token)):
            try:
                tenant = self._tenants.resolve(dict(request.headers), request.url.query)
            except StrataError as error:
                return _error(UNKNOWN_KEY, error.message)
            found = found if tenant.owner == found.owner else None
        if found is None:
            why = f"No request {request.path_params['id'][:64]!r} of this key is known to this process."
            return _error(NOT_FOUND, why)
        told = {"object": "request", **log.line(found)}
        if self._debug and found.divergence is not None:
            told["excerpts"] = {"was": redacted(found.divergence.was), "now": redacted(found.divergence.now)}
        return Response(orjson.dumps(told, default=str), media_type=JSON.decode())

    async def conversation(self, request: Request) -> Response:
        """Show or delete a named conversation: `GET` or `DELETE /strata/conversations/{id}?user=…`."""
        name = request.path_params["id"]
        try:
            tenant = self._tenants.resolve(dict(request.headers), request.url.query)
        except StrataError as error:
            return _error(UNKNOWN_KEY, error.message)
        keys = self._keys()
        digest = keys.conversation(keys.partition(tenant.owner), name, request.query_params.get("user", ""))
        if request.method == "DELETE":
            self._traces.forget(digest)
            try:
                known = await self._store.forget(digest, ttl_seconds=tenant.ttl_seconds)
            except Unavailable as error:
                return _error(NO_MEMORY, str(error))
            return _json({"id": name, "object": "conversation.deleted", "deleted": True}) if known else _missing(name)
        view = await self._store.view(digest)
        if view is None:
            return _missing(name)
        return _json(
            {
                "id": name,
                "object": "conversation",
                "updated_at": view.at,
                "turns": view.turns,
                "requests": view.requests,
                "prompt_tokens": view.prompt_tokens,
                "cached_tokens": view.cached_tokens,
                "layers": [
                    {"layer": layer, "tokens": tokens, "sha256": digest} for layer, tokens, digest in view.layers
                ],
                "library": [{"id": label, "type": tag, "sha256": digest} for label, tag, digest in view.library],
            }
        )


def _bears(request: Request, token: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


_SECRET = re.compile(r"\b(?:sk|pk|ghp|xox[a-z]|key|token)[-_][\w-]{6,}|[\w.+-]+@[\w-]+\.\w+|\b\d{9,}\b")


def redacted(text: str) -> str:
    """Return an excerpt without what looks like a key, an address or an account's number."""
    return _SECRET.sub("•••", text)


def _missing(name: str) -> Response:
    return _error(NOT_FOUND, f"No conversation {name!r} of this key is remembered.")


def _error(fault: Fault, message: str) -> Response:
    return Response(error_body(fault, message), status_code=fault.status, media_type=JSON.decode())


def _json(value: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON.decode())
