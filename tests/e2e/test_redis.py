"""Redis: killed, frozen and revived in mid-conversation, requests go through; two proxies on one Redis are as one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from proxy.simulator.app import Simulator, create
from proxy.simulator.server import serve
from tests.e2e.conftest import RedisProcess
from tests.e2e.kit import HANG, MODEL, Proxy, chat_body, note, strata, until

SPEC = note("project-spec.md", "The spec says many things. ")
API = note("api-docs.md", "The api has endpoints. ")
SECRET = "one-secret-for-all"


class Client:
    """A client that attaches context to its newest turn and strips it from the turns before."""

    def __init__(self, conversation: str) -> None:
        self._headers = {"x-strata-conversation": conversation}
        self._history: list[dict[str, Any]] = [{"role": "system", "content": "You are helpful."}]

    async def turn(self, proxy: Proxy, said: str, *attached: str) -> httpx.Response:
        """Send one turn; its history then holds the bare words."""
        newest = {"role": "user", "content": "\n\n".join([*attached, said])}
        body = {"model": MODEL, "messages": [*self._history, newest]}
        async with asyncio.timeout(HANG):
            answer = await proxy.post(body, headers=self._headers)
        assert answer.status_code == 200, answer.text
        reply = answer.json()["choices"][0]["message"]
        self._history += [{"role": "user", "content": said}, {"role": "assistant", "content": reply["content"]}]
        return answer


def sent(simulator: Simulator) -> str:
    """Return the texts of the last request the provider got, as one."""
    messages: list[dict[str, str]] = orjson.loads(simulator.requests[-1].body)["messages"]
    return "\n".join(message["content"] for message in messages)


@contextlib.asynccontextmanager
async def replicas(
    redis_url: str, count: int = 1, promotion: str = "deferred"
) -> AsyncIterator[tuple[Simulator, list[Proxy]]]:
    """Run a provider and so many proxies on one Redis before it."""
    provider = create()
    async with serve(provider) as upstream, contextlib.AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(
                strata(upstream.base_url, REDIS_URL=redis_url, SECRET=SECRET, PROMOTION=promotion)
            )
            for _ in range(count)
        ]
        yield provider.state.simulator, proxies


async def degraded(proxy: Proxy) -> float:
    return await proxy.total("strata_store_degraded")


async def becomes(proxy: Proxy, state: float) -> None:
    """Wait until the store is, or is no longer, degraded."""

    async def there() -> bool:
        return await degraded(proxy) == state

    await until(there)


async def written(redis: RedisProcess, pattern: bytes = b"*") -> set[bytes]:
    """Return Redis's keys."""
    reader, writer = await asyncio.open_connection("127.0.0.1", redis.port)
    writer.write(b"KEYS %b\r\n" % pattern)
    count = int((await reader.readline())[1:])
    found = set()
    for _ in range(count):
        size = int((await reader.readline())[1:])
        found.add((await reader.readexactly(size + 2))[:-2])
    writer.close()
    return found


LIBRARY = "<context_library>"


PROMOTIONS = pytest.mark.parametrize("promotion", ["deferred", "eager"])


@PROMOTIONS
async def test_a_conversation_over_two_replicas(redis_process: RedisProcess, promotion: str) -> None:
    """A conversation whose turns reach two replicas in turn has what was attached at both."""
    async with replicas(redis_process.url, 2, promotion) as (simulator, [one, two]):
        client = Client("c1")
        await client.turn(one, "Summarize.", SPEC)
        await asyncio.sleep(0.1)
        await client.turn(two, "And the API?", SPEC, API)
        assert (LIBRARY in sent(simulator)) is (promotion == "eager")
        assert sent(simulator).count("The spec says") == 60
        await asyncio.sleep(0.1)
        await client.turn(one, "Explain.", SPEC)
        assert sent(simulator).count("The spec says") == 60
        assert sent(simulator).count("The api has") == 60


@PROMOTIONS
async def test_two_replicas_give_the_same_bytes(redis_process: RedisProcess, promotion: str) -> None:
    """The same request in the same conversation gives the same bytes at either replica, and in a fresh one."""
    async with replicas(redis_process.url, 3, promotion) as (simulator, [one, two, fresh]):
        client = Client("c1")
        await client.turn(one, "Summarize.", SPEC)
        await client.turn(one, "And the API?", SPEC, API)
        await asyncio.sleep(0.2)
        history = list(client._history)
        bodies = []
        for proxy in (one, two, fresh, two, one):
            client._history = list(history)
            await client.turn(proxy, "Explain.", SPEC)
            bodies.append(simulator.requests[-1].body)
            await asyncio.sleep(0.1)
        assert (LIBRARY.encode() in bodies[0]) is (promotion == "eager")
        assert bodies[0].count(b"The spec says") == 60
        assert len(set(bodies)) == 1


async def test_replicas_without_a_secret_share_one(redis_process: RedisProcess) -> None:
    """Without `STRATA_SECRET` replicas find a common one in Redis, and with it each other's conversations."""
    provider = create()
    async with (
        serve(provider) as upstream,
        strata(upstream.base_url, REDIS_URL=redis_process.url) as one,
        strata(upstream.base_url, REDIS_URL=redis_process.url) as two,
    ):
        client = Client("c1")
        await client.turn(one, "Summarize.", SPEC)
        await asyncio.sleep(0.1)
        await client.turn(two, "And?")
        assert sent(provider.state.simulator).count("The spec says") == 60


@PROMOTIONS
async def test_restart_of_the_proxy(redis_process: RedisProcess, promotion: str) -> None:
    """A conversation survives the proxy's restart."""
    client = Client("c1")
    async with replicas(redis_process.url, promotion=promotion) as (_, [proxy]):
        await client.turn(proxy, "Summarize.", SPEC)
    async with replicas(redis_process.url, promotion=promotion) as (simulator, [proxy]):
        await client.turn(proxy, "And?")
        assert (LIBRARY in sent(simulator)) is (promotion == "eager")
        assert sent(simulator).count("The spec says") == 60


@PROMOTIONS
@pytest.mark.parametrize("how", ["kill", "freeze"])
async def test_redis_goes_and_comes_back(redis_process: RedisProcess, how: str, promotion: str) -> None:
    """Killed or frozen in mid-conversation and revived: every request succeeds with all its context, and it shows."""
    async with asyncio.timeout(6 * HANG), replicas(redis_process.url, promotion=promotion) as (simulator, [proxy]):
        client = Client("c1")
        await client.turn(proxy, "Summarize.", SPEC)
        await client.turn(proxy, "And the API?", SPEC, API)
        assert await degraded(proxy) == 0
        assert (await proxy.http.get("/readyz")).json()["store"] == "ok"

        if how == "kill":
            redis_process.kill()
        else:
            redis_process.freeze()
        for number in range(6):
            answer = await client.turn(proxy, f"Question {number}?", SPEC)
            # From its own copy: the spec stands once and is only named in the turn.
            assert sent(simulator).count("The spec says") == 60
            assert sent(simulator).count("The api has") == 60
        await becomes(proxy, 1)
        answer = await client.turn(proxy, "And now?")
        assert "degraded" in answer.headers["x-strata-warning"]
        ready = await proxy.http.get("/readyz")
        assert ready.status_code == 200
        assert ready.json() == {"status": "ready", "store": "degraded"}
        assert await proxy.total("strata_store_errors_total") >= 3

        if how == "kill":
            redis_process.start()
        else:
            redis_process.thaw()
        await becomes(proxy, 0)
        for number in range(3):
            answer = await client.turn(proxy, f"Again {number}?", SPEC)
            assert sent(simulator).count("The spec says") == 60
        assert "x-strata-warning" not in answer.headers
        assert await proxy.settled(12) == {"ok": 12}


async def test_many_requests_while_redis_is_frozen(redis_process: RedisProcess) -> None:
    """Forty conversations at once over a frozen Redis all get their answers, plain and streamed."""
    async with asyncio.timeout(3 * HANG), replicas(redis_process.url) as (_, [proxy]):
        await Client("warm").turn(proxy, "Hello.")
        redis_process.freeze()

        async def talk(number: int) -> None:
            client = Client(f"c{number}")
            await client.turn(proxy, "Summarize.", SPEC)
            await client.turn(proxy, "And?", SPEC)
            answer = await proxy.post(chat_body(stream=True), headers={"x-strata-conversation": f"c{number}"})
            assert answer.status_code == 200

        await asyncio.gather(*(talk(number) for number in range(40)))
        assert await degraded(proxy) == 1
        assert await proxy.settled(121) == {"ok": 121}
        redis_process.thaw()
        await becomes(proxy, 0)


async def test_anonymous_requests_do_not_ask_redis(redis_process: RedisProcess) -> None:
    """Without a conversation's name Redis is not asked, so a frozen one cannot delay."""
    async with asyncio.timeout(HANG), replicas(redis_process.url) as (_, [proxy]):
        redis_process.freeze()
        for _ in range(5):
            answer = await proxy.post(chat_body())
            assert answer.status_code == 200
            assert "x-strata-warning" not in answer.headers
        redis_process.thaw()


async def test_start_without_redis(redis_process: RedisProcess) -> None:
    """The proxy starts and serves while Redis is away, and takes it up once it is there."""
    redis_process.kill()
    async with asyncio.timeout(3 * HANG), replicas(redis_process.url) as (simulator, [proxy]):
        client = Client("c1")
        for number in range(4):
            await client.turn(proxy, f"Question {number}?", SPEC)
        assert sent(simulator).count("The spec says") == 60
        await becomes(proxy, 1)
        redis_process.start()
        await becomes(proxy, 0)
        await client.turn(proxy, "Now?", API)

        async def stored() -> bool:
            return bool(await written(redis_process, b"strata:*:log"))

        await until(stored)


async def test_start_with_a_frozen_redis(redis_process: RedisProcess) -> None:
    """A frozen Redis does not keep the proxy from starting, with or without a secret of its own."""
    redis_process.freeze()
    provider = create()
    async with (
        asyncio.timeout(3 * HANG),
        serve(provider) as upstream,
        strata(upstream.base_url, REDIS_URL=redis_process.url) as proxy,
    ):
        await Client("c1").turn(proxy, "Hello?", SPEC)
        redis_process.thaw()


async def test_deletion_while_redis_is_away(redis_process: RedisProcess) -> None:
    """A conversation that cannot be deleted everywhere is not said to be deleted."""
    async with asyncio.timeout(3 * HANG), replicas(redis_process.url) as (_, [proxy]):
        await Client("c1").turn(proxy, "Summarize.", SPEC)
        redis_process.freeze()
        headers = {"authorization": "Bearer key-one"}
        answer = await proxy.http.delete("/strata/conversations/c1", headers=headers)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "memory_unavailable"
        redis_process.thaw()
        await becomes(proxy, 0)
        # What was asked of the frozen Redis may have been done when it went on.
        assert (await proxy.http.delete("/strata/conversations/c1", headers=headers)).status_code in {200, 404}
        assert (await proxy.http.get("/strata/conversations/c1", headers=headers)).status_code == 404
        assert not await written(redis_process, b"strata:*:turns")


@pytest.mark.parametrize("shared", [False, True])
async def test_one_name_for_all_conversations(
    shared: bool, redis_process: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored under it is bounded, and each conversation's log goes on where it has not been pushed out."""
    monkeypatch.setattr("proxy.core.lineage.MOST_LEFT", 30)
    provider = create()
    more = {"REDIS_URL": redis_process.url} if shared else {}
    async with serve(provider) as upstream, strata(upstream.base_url, **more) as proxy:
        for number in range(60):
            client = Client("always-the-same")
            client._history[0]["content"] = f"You are helpful, {number}."
            await client.turn(proxy, f"Question {number}?", SPEC)
            await client.turn(proxy, "And?", SPEC)
            assert sent(provider.state.simulator).count("The spec says") == 60
            assert "Find them above" in sent(provider.state.simulator)
        if shared:
            [log] = await written(redis_process, b"strata:*:log")
            reader, writer = await asyncio.open_connection("127.0.0.1", redis_process.port)
            writer.write(b"HLEN %b\r\n" % log)
            assert int((await reader.readline())[1:]) < 150
            writer.close()


async def test_keys_in_redis_name_nobody(redis_process: RedisProcess) -> None:
    """Keys in Redis hold neither ids nor credentials, and all but the counters expire."""
    async with replicas(redis_process.url) as (_, [proxy]):
        await Client("conversation-of-alice").turn(proxy, "Summarize.", SPEC)

        async def counted() -> bool:
            return bool(await written(redis_process, b"strata:*:tenant:*"))

        await until(counted)
        keys = await written(redis_process)
        assert len(keys) >= 4
        assert all(key.startswith(b"strata:") for key in keys)
        assert not [key for key in keys if b"alice" in key or b"key-one" in key]
        reader, writer = await asyncio.open_connection("127.0.0.1", redis_process.port)
        for key in keys:
            if b":{" in key:
                writer.write(b"TTL %b\r\n" % key)
                assert 86_000 < int((await reader.readline())[1:]) <= 86_400, key
        writer.close()


async def test_redis_that_lies(redis_process: RedisProcess) -> None:
    """What is stored being rubbish, requests go through on the process's own copy."""
    async with replicas(redis_process.url) as (simulator, [proxy]):
        client = Client("c1")
        await client.turn(proxy, "Summarize.", SPEC)
        await asyncio.sleep(0.2)
        keys = await written(redis_process, b"strata:*")
        reader, writer = await asyncio.open_connection("127.0.0.1", redis_process.port)
        for key in keys:
            if key.endswith(b":turns"):
                writer.write(b"HSET %b zz rubbish nonsense:x \xff\xfe\r\n" % key)
                await reader.readline()
        writer.close()
        await client.turn(proxy, "And?", SPEC)
        assert sent(simulator).count("The spec says") == 60
        for key in keys:
            if key.endswith((b":turns", b":contents")):
                reader, writer = await asyncio.open_connection("127.0.0.1", redis_process.port)
                writer.write(b"SET %b rubbish\r\n" % key)
                await reader.readline()
                writer.close()
        for _ in range(4):
            await client.turn(proxy, "And?", SPEC)
            assert sent(simulator).count("The spec says") == 60


async def test_a_lineage_keeps_its_form_at_another_replica(redis_process: RedisProcess) -> None:
    """An anonymous one too: each clock is told once, and L1 is the same wherever the next turn arrives."""
    policy = "\n".join(f"Rule {number} stands for every customer." for number in ("one", "two", "three"))
    async with replicas(redis_process.url, 3) as (simulator, proxies):
        messages: list[dict[str, Any]] = []
        systems = []
        for minute in range(6):
            messages.append({"role": "user", "content": f"Question {minute}"})
            clock = {"role": "system", "content": f"Time: 10:{minute:02}\n{policy}"}
            answer = await proxies[minute % 3].post(chat_body(messages=[clock, *messages]))
            forwarded = orjson.loads(simulator.requests[-1].body)["messages"]
            systems.append(forwarded[0]["content"])
            assert str(forwarded).count(f"10:{minute:02}") == 1
            messages.append(answer.json()["choices"][0]["message"])
            await asyncio.sleep(0.1)
        assert len(set(systems[1:])) == 1
