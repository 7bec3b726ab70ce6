"""Everything that is no chat: passed through as it is, both ways, never held as a whole."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope, Send

from proxy.downstream import ClientGone, Downstream
from proxy.errors import INTERNAL, NO_WEBSOCKET, NOT_ALLOWED, StrataError
from proxy.tenants import Tenants
from proxy.upstream import headers
from proxy.upstream.client import Answer, Client, Exchange, Interrupted, Truncated
from proxy.upstream.target import is_stateless, normal


class Passthrough:
    """One upstream's other routes."""

    def __init__(self, *, tenants: Tenants, client: Client) -> None:
        self._tenants = tenants
        self._client = client

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay one request; an answer that breaks off ends the connection, so that the client notices."""
        client = Downstream(scope, receive, send)
        exchange = Exchange()
        watching = asyncio.ensure_future(_watch(client, exchange))
        try:
            answer = await self._send(client, exchange)
            try:
                await _relay(answer, client)
            finally:
                await answer.close()
        except (ClientGone, Interrupted, Truncated):
            return
        except StrataError as error:
            if not client.begun:
                await client.refuse(error, [])
        except Exception as error:  # noqa: BLE001 -- the outer edge: whatever it is, the client gets an answer
            if not client.begun:
                await client.refuse(StrataError(INTERNAL, f"Internal error ({type(error).__name__})"), [])
        finally:
            watching.cancel()

    async def _send(self, client: Downstream, exchange: Exchange) -> Answer:
        scope = client.scope
        tenant = self._tenants.resolve(client.headers, scope["query_string"].decode("latin-1"))
        if client.headers.get("upgrade", "").lower() == "websocket":
            raise StrataError(NO_WEBSOCKET, "WebSocket upgrades are not supported; use the HTTP form of this route.")
        if tenant.shares_key and not is_stateless(scope["method"], normal(scope["raw_path"])):
            raise StrataError(
                NOT_ALLOWED,
                f"{scope['path']} keeps data at the upstream, where tenants share one key; it needs a key of the "
                f"tenant's own (STRATA_TENANTS__{tenant.name.upper()}__UPSTREAM_KEY).",
            )
        sent = headers.upstream(
            scope["headers"], key=tenant.upstream_key, hide=tenant.hides_credentials, drop=frozenset({b"expect"})
        )
        body = b"" if client.bodiless() else client.pieces()
        return await self._client.send(
            scope["method"],
            path=scope["raw_path"],
            query=headers.query(scope["query_string"], hide=tenant.hides_credentials),
            headers=sent,
            body=body,
            exchange=exchange,
        )


async def _relay(answer: Answer, client: Downstream) -> None:
    await client.begin(answer.status, headers.downstream(answer.headers))
    while data := await answer.read():
        await client.send(data, more=True)
    await client.send(b"", more=False)


async def _watch(client: Downstream, exchange: Exchange) -> None:
    await client.gone()
    exchange.end("client")
