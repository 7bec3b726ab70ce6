"""Quotas as clients meet them: refused in words their SDKs know, settled to the token, shared by replicas."""

from __future__ import annotations

import asyncio
import json
from decimal import Decimal
from typing import Any

import httpx
import openai
import orjson
import pytest
import redis.asyncio
from openai import AsyncOpenAI

from proxy.memory.redis import RedisStore
from proxy.simulator.app import Options, create
from proxy.simulator.server import serve
from tests.e2e.kit import (
    COMPLETION,
    HANG,
    MODEL,
    Proxy,
    Rig,
    Wire,
    chat_body,
    dial,
    events,
    plain_request,
    rigged,
    scripted,
    strata,
    until,
)  # fmt: skip

KEY = {"TENANTS__ACME__KEYS": "key-one", "UPSTREAM_KEY": "sk-up", "OUTPUT_RESERVE_TOKENS": "200"}
PRICES = '{"gpt-5.1": {"input": 1.25, "cached_read": 0.125, "output": 10}}'


def acme(**quotas: str) -> dict[str, str]:
    """Return settings for one tenant with these quotas."""
    return {**KEY, **{f"TENANTS__ACME__{name}": value for name, value in quotas.items()}}


def error(answer: httpx.Response) -> dict[str, str]:
    """Return an answer's error."""
    found: dict[str, str] = answer.json()["error"]
    return found


async def used(proxy: Proxy, quota: str, limit: int) -> int:
    """Return what the tenant has used of a quota, as the metrics tell it."""
    return round(await proxy.total("strata_quota_used_ratio", tenant="acme", quota=quota) * limit)


async def test_a_rate_is_refused_as_openai_refuses_it() -> None:
    """429 with the headers an SDK waits by; nothing is forwarded; the next tenant is not held up."""
    async with rigged(None, **acme(REQUESTS_PER_MINUTE="2"), TENANTS__LAB__KEYS="lab") as rig:
        good = [await rig.proxy.post(chat_body()) for _ in range(2)]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in good] == ["1", "0"]
        assert good[0].headers["x-ratelimit-limit-requests"] == "2"
        assert good[0].headers["x-ratelimit-reset-requests"].endswith("s")
        refused = await rig.proxy.post(chat_body())
        assert refused.status_code == 429
        assert (error(refused)["code"], error(refused)["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert "requests_per_minute: limit 2, used 2, requested 1" in error(refused)["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-should-retry"] == "true"
        assert len(rig.entries) == 2
        assert (await rig.proxy.post(chat_body(), headers={"authorization": "Bearer lab"})).status_code == 200
        assert await rig.proxy.settled(4) == {"ok": 3, "refused": 1}
        refusals = await rig.proxy.total("strata_quota_refusals_total", tenant="acme", mode="enforce")
        assert refusals == 1


@pytest.mark.parametrize(
    ("quota", "limit", "said"),
    [
        ("TOKENS_PER_DAY", "150", "tokens_per_day: limit 150, used 0, requested 530"),
        ("TOKENS_PER_MONTH", "150", "tokens_per_month: limit 150, used 0, requested 530"),
        ("USD_PER_DAY", "0.001", "usd_per_day: limit 0.001, used 0, requested 0.005"),
        ("USD_PER_MONTH", "0.001", "usd_per_month: limit 0.001, used 0, requested 0.005"),
    ],
)
async def test_a_used_up_period_is_no_reason_to_try_again(quota: str, limit: str, said: str) -> None:
    """403 with `insufficient_quota`, which the SDK raises at once."""
    async with rigged(None, **acme(**{quota: limit}), PRICES=PRICES) as rig:
        async with AsyncOpenAI(base_url=rig.proxy.base_url, api_key="key-one", max_retries=3) as client:
            with pytest.raises(openai.PermissionDeniedError) as raised:
                await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=500
                )
        assert raised.value.code == "insufficient_quota"
        assert said in raised.value.message
        assert raised.value.response.headers["x-should-retry"] == "false"
        assert not rig.entries


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_settled_is_what_the_provider_reported(stream: bool) -> None:
    """To the token and, in US dollars, to the billionth."""
    async with rigged(None, **acme(TOKENS_PER_DAY="100000", USD_PER_DAY="1"), PRICES=PRICES) as rig:
        tokens, paid = 0, Decimal(0)
        for number in range(4):
            await rig.proxy.post(chat_body(f"Question {number} " * 300, stream=stream))
            charge = rig.last.charge
            assert charge is not None
            tokens += charge.prompt_tokens + rig.last.completion_tokens
            paid += Decimal("1.25") * charge.uncached_tokens + Decimal("0.125") * charge.cached_tokens
            paid += 10 * rig.last.completion_tokens
        await rig.proxy.settled(4)
        answer = await rig.proxy.post(chat_body(max_completion_tokens=1))
        told = dict(pair.split("=") for pair in answer.headers["x-strata-quota"].split("; "))
        reserved = len(orjson.dumps(chat_body(max_completion_tokens=1))) // 3 + 1
        assert int(told["tokens_per_day"].split("/")[0]) == tokens + reserved
        assert Decimal(told["usd_per_day"].split("/")[0]) == pytest.approx(paid / 1_000_000, abs=Decimal("0.0002"))


async def test_a_request_that_the_upstream_refused_costs_nothing() -> None:
    """What was reserved for it is given back."""
    async with rigged(Options(keys=frozenset({"another"})), **acme(TOKENS_PER_DAY="1000")) as rig:
        for _ in range(6):
            assert (await rig.proxy.post(chat_body())).status_code == 401
        await rig.proxy.settled(6)
        assert await used(rig.proxy, "tokens_per_day", 1_000) < 260


async def test_a_stream_that_breaks_off_is_settled_by_estimate() -> None:
    """The prompt as Strata counts it, and a token for each piece that came."""

    async def breaks(wire: Wire) -> None:
        await wire.request()
        await wire.begin_stream()
        for _ in range(20):
            await wire.send_chunk(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
            await asyncio.sleep(0.002)
        wire.reset()

    async with scripted(breaks) as upstream, strata(upstream.url, **acme(TOKENS_PER_DAY="5000")) as proxy:
        await proxy.post(chat_body("word " * 1_000, stream=True))
        assert await proxy.settled(1) == {"upstream_interrupted": 1}
        await proxy.post(chat_body(stream=True, max_completion_tokens=1))
        assert 1_010 <= await used(proxy, "tokens_per_day", 5_000) <= 1_100


async def test_requests_under_way_are_counted() -> None:
    """A third has to wait for one of two; it may go when that has ended."""
    async with rigged(Options(first_token_seconds=0.4), **acme(CONCURRENT_REQUESTS="2")) as rig:
        answers = await asyncio.gather(*(rig.proxy.post(chat_body(stream=True)) for _ in range(3)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429]
        assert (await rig.proxy.post(chat_body())).status_code == 200


async def test_shadow_tells_and_refuses_nothing() -> None:
    """In a warning and in the metrics."""
    async with rigged(None, **acme(TOKENS_PER_DAY="50", QUOTA_MODE="shadow")) as rig:
        answer = await rig.proxy.post(chat_body())
        assert answer.status_code == 200
        assert "over quota: tokens_per_day (shadow" in answer.headers["x-strata-warning"]
        assert await rig.proxy.total("strata_quota_refusals_total", mode="shadow", quota="tokens_per_day") == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "text-embedding-3-small", "input": "word " * 200}),
        ("/v1/responses", {"model": MODEL, "input": "word " * 200}),
        ("/v1/responses", {"model": MODEL, "input": "word " * 200, "stream": True}),
        ("/v1/completions", {"model": MODEL, "prompt": "word " * 200}),
    ],
)
async def test_other_routes_count_too(path: str, body: dict[str, object]) -> None:
    """A quota of the chat route alone would be none."""
    async with rigged(None, **acme(TOKENS_PER_DAY="100000"), TENANTS__ACME__UPSTREAM_KEY="sk-own") as rig:
        first = await rig.proxy.post(body, path=path)
        assert first.status_code == 200
        if (charge := rig.last.charge) is not None:
            spent = charge.prompt_tokens + rig.last.completion_tokens
        else:
            spent = first.json()["usage"]["total_tokens"]
        assert spent > 100
        await asyncio.sleep(0.05)
        answer = await rig.proxy.post({"model": MODEL, "input": "hi"}, path="/v1/embeddings")
        told = int(answer.headers["x-strata-quota"].partition("=")[2].partition("/")[0])
        assert 0 < told - spent < 20


LONG = orjson.dumps({"object": "list", "data": ["x" * 1_000] * 3_000, "model": MODEL,
                     "usage": {"prompt_tokens": 5_000, "total_tokens": 5_000}})  # fmt: skip
ANTHROPIC = (
    b'event: message_start\ndata: {"type":"message_start","message":{"model":"m","usage":{"input_tokens":4000,'
    b'"output_tokens":1}}}\n\nevent: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":1000}}\n\n'
)
UNTOLD = b"".join(b'data: {"choices":[{"text":"a"}]}\n\n' for _ in range(300)) + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("path", "answer", "kind", "least", "most"),
    [
        ("/v1/embeddings", LONG, "application/json", 5_000, 5_000),
        ("/v1/messages", ANTHROPIC, "text/event-stream", 5_000, 5_000),
        ("/v1/completions", UNTOLD, "text/event-stream", 600, 700),
        ("/v1/moderations", b'{"id":"m","results":[]}', "application/json", 300, 400),
    ],
    ids=["too long to be kept", "two events tell it", "nothing tells it", "no usage"],
)
async def test_what_other_routes_used_is_found_or_estimated(
    path: str, answer: bytes, kind: str, least: int, most: int
) -> None:
    """At the end of a long answer, in two events; else by what was asked and what came."""

    async def answers(wire: Wire) -> None:
        while True:
            got = await wire.request()
            assert got.header("accept-encoding") == "identity"
            await wire.answer(answer, kind=kind)

    settings = acme(TOKENS_PER_DAY="1000000", UPSTREAM_KEY="sk-own")
    async with scripted(answers) as upstream, strata(upstream.url, **settings) as proxy:
        body = {"model": MODEL, "input": "word " * 200, "max_tokens": 2_000}
        first = await proxy.post(body, path=path, headers={"accept-encoding": "gzip"})
        assert first.content == answer
        await asyncio.sleep(0.1)
        second = await proxy.post({"input": "x"}, path="/v1/moderations", headers={"accept-encoding": "gzip"})
        told = int(second.headers["x-strata-quota"].partition("=")[2].partition("/")[0])
        assert least <= told - len(orjson.dumps({"input": "x"})) // 3 <= most


async def test_money_is_reserved_on_other_routes_too() -> None:
    """Thirty at once cannot all spend what one may."""
    settings = acme(USD_PER_DAY="0.05", UPSTREAM_KEY="sk-own")
    async with rigged(Options(first_token_seconds=0.2), **settings, PRICES=PRICES) as rig:
        body = {"model": MODEL, "input": "hi", "max_output_tokens": 1_000}
        answers = await asyncio.gather(*(rig.proxy.post(body, path="/v1/responses") for _ in range(30)))
        assert sum(answer.status_code == 200 for answer in answers) == 4
        assert {answer.status_code for answer in answers} == {200, 403}


@pytest.mark.parametrize("more", [{"max_tokens": 10**19}, {"max_completion_tokens": 10**400}, {"n": 10**30}])
async def test_a_huge_number_is_nobodys_outage(redis_url: str, more: dict[str, int]) -> None:
    """One tenant's odd request leaves the others' quotas, the store and the answer as they are."""
    options = {**acme(REQUESTS_PER_MINUTE="100"), "TENANTS__LAB__KEYS": "lab", "TENANTS__LAB__REQUESTS_PER_MINUTE": "1"}
    async with rigged(None, **options, REDIS_URL=redis_url, SECRET=repr(more)) as rig:
        body = orjson.dumps(chat_body())[:-1] + b"," + json.dumps(more).encode()[1:]
        for _ in range(6):
            assert (await rig.proxy.post(body)).status_code in {200, 400}, "the upstream may refuse it"
        assert len(rig.entries) == 6
        assert (await rig.proxy.http.get("/readyz")).json()["store"] == "ok"
        lab = {"authorization": "Bearer lab"}
        assert [(await rig.proxy.post(chat_body(), headers=lab)).status_code for _ in range(2)] == [200, 429]
        assert await rig.proxy.total("strata_quota_unknown_total") == 0


async def test_a_request_whose_answers_from_redis_were_lost_counts_once(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Redis that was frozen does later what was asked of it: what is asked again is known by then."""
    run, asked = RedisStore.run, []

    async def losing(*given: Any, **named: Any) -> Any:
        answer = await run(*given, **named)
        asked.append(given[1])
        return None if len(asked) <= 2 else answer

    monkeypatch.setattr(RedisStore, "run", losing)
    async with rigged(None, **acme(TOKENS_PER_DAY="100000"), REDIS_URL=redis_url, SECRET="lost answers") as rig:
        spent = 0
        for so_far in (2, 5):
            await rig.proxy.post(chat_body("word " * 100))
            assert rig.last.charge is not None
            spent += rig.last.charge.prompt_tokens + rig.last.completion_tokens

            async def told(so_far: int = so_far) -> bool:
                return len(asked) == so_far

            await until(told)
        answer = await rig.proxy.post(chat_body(max_completion_tokens=1))
        reserved = len(orjson.dumps(chat_body(max_completion_tokens=1))) // 3 + 1
        assert answer.headers["x-strata-quota"] == f"tokens_per_day={spent + reserved}/100000"


@pytest.mark.parametrize("held", [True, False])
async def test_a_client_is_one_whatever_else_it_sends(held: bool) -> None:
    """By the key its upstream charges; all who spend the proxy's own key are one."""
    settings = {"REQUESTS_PER_MINUTE": "2", **({"UPSTREAM_KEY": "sk-up"} if held else {})}
    async with rigged(None, **settings) as rig:
        found = []
        for number in range(4):
            headers = {"openai-project": f"p{number}", "api-key": f"k{number}"}
            if held:
                headers["authorization"] = f"Bearer invented-{number}"
            found.append((await rig.proxy.post(chat_body(), headers=headers)).status_code)
        assert found == [200, 200, 429, 429]


async def test_fifty_clients_of_three_tenants_at_two_replicas(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settled totals are the provider's own to the token; no tenant is admitted beyond its quota."""
    monkeypatch.setattr("proxy.memory.quotas.RECALL_SECONDS", 10.0)
    limits = {"ACME": 9_000, "BETA": 6_000, "LAB": 200_000}
    options = {"REDIS_URL": redis_url, "SECRET": "one-secret", "UPSTREAM_KEY": "sk-up", "OUTPUT_RESERVE_TOKENS": "100"}
    for name, limit in limits.items():
        options |= {f"TENANTS__{name}__KEYS": f"key-{name}", f"TENANTS__{name}__TOKENS_PER_DAY": str(limit)}
    provider = create(Options(reply_words=20))
    async with (
        serve(provider) as upstream,
        strata(upstream.base_url, **options) as one,
        strata(upstream.base_url, **options) as other,
    ):

        async def client(number: int) -> None:
            name = ("ACME", "BETA", "LAB")[number % 3]
            for step in range(4):
                proxy = (one, other)[(number + step) % 2]
                headers = {"authorization": f"Bearer key-{name}", "x-tenant": name}
                answer = await proxy.post(
                    chat_body(f"{number} {step} " + "word " * 40, stream=bool(step % 2)), headers=headers
                )
                assert answer.status_code in {200, 403}

        async with asyncio.timeout(2 * HANG):
            await asyncio.gather(*(client(number) for number in range(50)))
            await one.settled(100)
            await other.settled(100)
        spent = dict.fromkeys(limits, 0)
        for entry in provider.state.simulator.requests:
            assert entry.charge is not None
            spent[entry.headers["x-tenant"]] += entry.charge.prompt_tokens + entry.completion_tokens
        await asyncio.sleep(0.2)
        for name, limit in limits.items():
            body = chat_body(max_completion_tokens=1)
            answer = await one.post(body, headers={"authorization": f"Bearer key-{name}"})
            if answer.status_code == 200:
                told = int(answer.headers["x-strata-quota"].partition("=")[2].partition("/")[0])
                assert told - (len(orjson.dumps(body)) // 3 + 1) == spent[name]
            assert spent[name] <= limit
        assert spent["LAB"] > 100 * 40


@pytest.mark.parametrize(("setting", "status"), [("open", 200), ("closed", 503)])
async def test_without_redis_the_setting_decides(setting: str, status: int) -> None:
    """And what was not looked up is counted."""
    options = {"REDIS_URL": "redis://127.0.0.1:1/0", "QUOTA_WITHOUT_REDIS": setting}
    async with rigged(None, **acme(TOKENS_PER_DAY="1"), **options) as rig:
        answer = await rig.proxy.post(chat_body())
        assert answer.status_code == status
        if status == 503:
            assert error(answer)["code"] == "quota_unavailable"
        assert await rig.proxy.total("strata_quota_unknown_total", tenant="acme") == 1


async def test_a_body_that_is_not_understood_is_held_to_quotas_too(rig: Rig) -> None:
    """`bypass` is no way around them."""
    async with rigged(None, **acme(REQUESTS_PER_MINUTE="1")) as own:
        odd = b'{"model": "gpt-5.1", "model": "gpt-5.1", "messages": [{"role": "user", "content": "hi"}]}'
        assert (await own.proxy.post(odd)).status_code == 200
        assert (await own.proxy.post(odd)).status_code == 429


async def test_other_routes_count_for_who_leaves_early() -> None:
    """The upstream has been made to work; what never reached it counts nothing."""

    async def late(wire: Wire) -> None:
        if b"first" in (await wire.request()).body:
            await wire.gone()
        else:
            await wire.answer(COMPLETION)

    def body(words: str) -> bytes:
        return orjson.dumps({"model": MODEL, "input": words * 6_000, "max_output_tokens": 100})

    async with scripted(late) as upstream, strata(upstream.url, **acme(TOKENS_PER_DAY="100000")) as proxy:
        async with dial(proxy.port) as wire:
            await wire.send(plain_request(body("first "), path="/v1/responses"))
            await until(lambda: len(upstream.got) == 1)

        async def counted() -> bool:
            await proxy.post({"model": MODEL, "input": "x", "max_output_tokens": 1}, path="/v1/responses")
            return await used(proxy, "tokens_per_day", 100_000) >= len(body("first ")) // 3

        async with asyncio.timeout(HANG):
            await until(counted)


async def test_what_was_admitted_too_late_is_given_back(redis_url: str) -> None:
    """Redis answered after nobody waited any more: the request was refused, and holds nothing."""
    more = acme(CONCURRENT_REQUESTS="1")
    provider = create()
    async with (
        serve(provider) as upstream,
        strata(upstream.base_url, REDIS_URL=redis_url, SECRET="late", QUOTA_WITHOUT_REDIS="closed", **more) as proxy,
    ):
        assert (await proxy.post(chat_body())).status_code == 200
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            await client.execute_command("CLIENT", "PAUSE", 200, "ALL")
        assert (await proxy.post(chat_body())).status_code == 503

        async def free() -> bool:
            return (await proxy.post(chat_body())).status_code == 200

        async with asyncio.timeout(HANG):
            await until(free)


async def test_a_picture_is_no_text_on_other_routes_either() -> None:
    """Base64 is not read by the letter."""
    picture = f"data:image/png;base64,{'iVBORw0KGgo' * 90_000}"
    body = {"model": MODEL, "input": [{"role": "user", "content": [{"type": "input_image", "image_url": picture}]}]}
    async with rigged(None, **acme(TOKENS_PER_MINUTE="20000")) as rig:
        answer = await rig.proxy.post(body, path="/v1/responses")
        assert answer.status_code == 200, answer.text


async def test_a_client_that_leaves_gives_its_reservation_back() -> None:
    """What came until then is settled."""
    async with rigged(Options(event_seconds=0.05), **acme(CONCURRENT_REQUESTS="1")) as rig:
        async with rig.proxy.openai() as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
            )
            async for _ in stream:
                break
            await stream.close()
        assert await rig.proxy.settled(1) == {"client_closed": 1}
        assert (await rig.proxy.post(chat_body(stream=True))).status_code == 200
        assert events(b"data: {}\n\n")
