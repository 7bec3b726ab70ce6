"""The head of a request: what clients offer in it that Strata does not take, and how large it may be."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from tests.e2e.kit import COMPLETION, HANG, Rig, always, chat_body, dial, plain_request, scripted, strata

OFFER = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAA")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
@pytest.mark.parametrize("cuts", [(), (7,), (150,), (40, 41, 130, 131, 170), tuple(range(1, 400))])
async def test_an_offer_of_http2_is_declined(path: str, cuts: tuple[int, ...]) -> None:
    """As Java's own client makes it, however it is cut on the way: the request is answered, and the next one too."""
    body = orjson.dumps(chat_body())
    raw = plain_request(body, *OFFER, path=path)
    pieces = [raw[start:end] for start, end in zip((0, *cuts), (*cuts, len(raw)), strict=True)]
    async with asyncio.timeout(HANG), scripted(always(COMPLETION)) as upstream, strata(upstream.url) as proxy:
        async with dial(proxy.port) as wire:
            for _ in range(2):
                for piece in pieces:
                    await wire.send(piece)
                    await asyncio.sleep(0)
                status, _, answer = await wire.response()
                assert (status, answer) == (200, COMPLETION)
        assert [got.body for got in upstream.got] == [body, body]
        assert not [name for got in upstream.got for name in ("upgrade", "http2-settings") if got.header(name)]


async def test_words_of_a_body_are_no_head() -> None:
    """A body that says `upgrade:` on a line of its own arrives as it was sent."""
    body = b'{"model":"m","messages":[{"role":"user","content":"x"}]\n\nupgrade: h2c\n}'
    async with asyncio.timeout(HANG), scripted(always(COMPLETION)) as upstream, strata(upstream.url) as proxy:
        async with dial(proxy.port) as wire:
            for cut in (1, len(body) // 2, len(body)):
                raw = plain_request(body, path="/v1/embeddings")
                await wire.send(raw[:-cut])
                await asyncio.sleep(0.01)
                await wire.send(raw[-cut:])
                assert (await wire.response())[0] == 200
        assert [got.body for got in upstream.got] == [body] * 3


async def test_requests_one_behind_the_other_are_all_answered() -> None:
    """Sent at once, and with blank lines between them."""
    raw = plain_request(orjson.dumps(chat_body()))
    async with (
        asyncio.timeout(HANG),
        scripted(always(COMPLETION)) as upstream,
        strata(upstream.url) as proxy,
        dial(proxy.port) as wire,
    ):
        await wire.send(b"\r\n" + raw + raw + b"\r\n" + raw[:60])
        for _ in range(2):
            assert (await wire.response())[0] == 200
        await wire.send(raw[60:])
        assert (await wire.response())[0] == 200


@pytest.mark.parametrize("raw", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"<html>", b"{}"])
async def test_what_is_no_http_is_refused_at_once(raw: bytes, rig: Rig) -> None:
    """A client that speaks TLS to a plain port does not wait."""
    async with asyncio.timeout(HANG), dial(rig.proxy.port) as wire:
        await wire.send(raw)
        assert (await wire.response())[0] == 400


async def test_a_head_is_bounded(rig: Rig) -> None:
    """Whoever sends headers without end is told so; a long one that fits passes."""
    async with asyncio.timeout(HANG), dial(rig.proxy.port) as wire:
        await wire.send(plain_request(orjson.dumps(chat_body()), *[f"x-long-{at}: {'x' * 3_000}" for at in range(20)]))
        assert (await wire.response())[0] == 200
    for line in ("x: " + "x" * 100_000, "\r\n".join(f"x-{at}: {'x' * 1_000}" for at in range(100))):
        async with asyncio.timeout(HANG), dial(rig.proxy.port) as wire:
            await wire.send(plain_request(orjson.dumps(chat_body()), line))
            status, _, told = await wire.response()
            assert (status, orjson.loads(told)["error"]["code"]) == (431, "request_head_too_large")
    assert len(rig.entries) == 1
