"""Whose request it is: keys select tenants, credentials stay where they belong, nothing is shared between owners."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import orjson
import pytest

from tests.e2e.kit import (
    COMPLETION,
    MODEL,
    USAGE_ASKED,
    Proxy,
    Rig,
    Scripted,
    always,
    chat_body,
    dial,
    note,
    plain_request,
    rigged,
    scripted,
    strata,
)
from tests.e2e.test_errors import openai_shape

TENANTS = {
    "UPSTREAM_KEY": "sk-shared",
    "TENANTS__ACME__KEYS": "acme-1, acme-2",
    "TENANTS__ACME__BUDGET_TOKENS": "2000",
    "TENANTS__BETA__KEYS": "beta-1",
    "TENANTS__WATCHED__KEYS": "watched-1",
    "TENANTS__WATCHED__MODE": "observe",
    "TENANTS__OWNER__KEYS": "owner-1",
    "TENANTS__OWNER__UPSTREAM_KEY": "sk-owner",
    "OUTPUT_RESERVE_TOKENS": "100",
}
ITEM = note("secret-plan.md", "The secret plan says many things. ")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def tenants() -> AsyncIterator[Rig]:
    """A rig with four tenants, three of which share one upstream key."""
    async with rigged(**TENANTS) as rig:
        yield rig


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("wrong"), bearer("acme"), bearer("sk-shared"), {"authorization": "Basic acme-1"}, {"api-key": "wrong"}],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"), ("POST", "/v1/embeddings"), ("GET", "/v1/models"), ("GET", "/v1/files"),
        ("GET", "/strata/conversations/c1"), ("DELETE", "/strata/conversations/c1"), ("GET", "/anything"),
    ],
)  # fmt: skip
async def test_unknown_key(tenants: Rig, method: str, path: str, headers: dict[str, str]) -> None:
    """A key that belongs to no tenant is a 401 in the OpenAI shape, on every route, and reaches no upstream."""
    answer = await tenants.proxy.http.request(method, path, headers=headers, content=orjson.dumps(chat_body()))
    assert answer.status_code == 401
    openai_shape(answer, "invalid_api_key")
    assert not tenants.entries


async def test_sdk_sees_an_unknown_key_as_such(tenants: Rig) -> None:
    """The OpenAI SDK raises AuthenticationError for a key of no tenant, which is recorded as refused."""
    async with tenants.proxy.openai("nobodys-key") as client:
        with pytest.raises(openai.AuthenticationError) as raised:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    assert raised.value.code == "invalid_api_key"
    assert "nobodys-key" not in str(raised.value)
    assert await tenants.proxy.settled(1) == {"refused": 1}


@pytest.mark.parametrize(
    ("headers", "tenant", "key"),
    [
        (bearer("acme-1"), "acme", "sk-shared"), (bearer("acme-2"), "acme", "sk-shared"),
        ({"authorization": "bearer  beta-1"}, "beta", "sk-shared"), ({"api-key": "beta-1"}, "beta", "sk-shared"),
        ({"x-api-key": "beta-1"}, "beta", "sk-shared"), (bearer("owner-1"), "owner", "sk-owner"),
    ],
)  # fmt: skip
async def test_keys_select_tenants(tenants: Rig, headers: dict[str, str], tenant: str, key: str) -> None:
    """Each key of a tenant, in whatever header, counts for it and goes upstream as the tenant's upstream key."""
    body = orjson.dumps(chat_body())
    answer = await tenants.proxy.http.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 200
    assert tenants.last.headers.getlist("authorization") == [f"Bearer {key}"]
    assert "api-key" not in tenants.last.headers
    assert "x-api-key" not in tenants.last.headers
    await tenants.proxy.settled(1)
    assert await tenants.proxy.total("strata_requests_total", tenant=tenant, outcome="ok") == 1


CREDENTIALS = {
    "api-key": "client-secret-1", "x-api-key": "client-secret-2", "x-goog-api-key": "client-secret-3",
    "cookie": "session=client-secret-4", "openai-organization": "org-client-secret-5",
    "openai-project": "proj-client-secret-6", "proxy-authorization": "Basic client-secret-7",
    "ocp-apim-subscription-key": "client-secret-8", "helicone-auth": "Bearer client-secret-9",
}  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/models"])
@pytest.mark.parametrize("held", ["for all", "for tenants"])
async def test_no_client_credential_goes_upstream(path: str, held: str) -> None:
    """With an upstream key held by the proxy nothing of the client's credentials or organisation goes upstream."""
    settings = {"UPSTREAM_KEY": "sk-held"} if held == "for all" else TENANTS
    key = "client-secret-0" if held == "for all" else "acme-1"
    async with rigged(**settings) as rig:
        headers = {**CREDENTIALS, **bearer(key)}
        method = "GET" if path == "/v1/models" else "POST"
        answer = await rig.proxy.http.request(method, path, json=chat_body(input="a"), headers=headers)
        assert answer.status_code == 200, answer.text
        raw = repr(rig.last.headers.raw)
        assert "client-secret" not in raw
        assert "acme-1" not in raw
        assert rig.last.headers.getlist("authorization") == [f"Bearer {settings['UPSTREAM_KEY']}"]


async def test_no_client_credential_goes_upstream_in_the_query() -> None:
    """A key in the query, as Google's API takes it, is a credential too and stays here when a key is held."""
    async with rigged(UPSTREAM_KEY="sk-held") as rig:
        await rig.proxy.http.get("/v1/models?key=client-secret&after=a")
        assert "client-secret" not in rig.last.query
        await rig.proxy.post(chat_body(), path="/v1/chat/completions?key=client-secret")
        assert "client-secret" not in rig.last.query


async def test_without_tenants_the_clients_credentials_pass(rig: Rig) -> None:
    """Without an upstream key the client's own credentials and organisation go upstream as they came."""
    headers = {**CREDENTIALS, **bearer("mine")}
    del headers["proxy-authorization"]
    await rig.proxy.post(chat_body(), headers=headers)
    for name, value in headers.items():
        assert rig.last.headers.getlist(name) == [value]


async def test_tenants_without_any_upstream_key() -> None:
    """A tenant's key is the proxy's own business: without an upstream key it still does not go upstream."""
    async with rigged(TENANTS__ACME__KEYS="acme-1") as rig:
        await rig.proxy.post(chat_body(), headers=bearer("acme-1"))
        assert "authorization" not in rig.last.headers


STATELESS = (
    ("POST", "/v1/chat/completions"), ("POST", "/v1/embeddings"), ("GET", "/v1/models"), ("GET", "/v1/models/a"),
    ("POST", "/v1/moderations"), ("POST", "/v1/completions"), ("POST", "/v1/images/generations"),
    ("POST", "/v1/audio/speech"), ("POST", "/chat/completions"),
)  # fmt: skip
STATEFUL = (
    ("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", "/v1/files/f/content"), ("DELETE", "/v1/files/f"),
    ("POST", "/v1/batches"), ("GET", "/v1/batches"), ("POST", "/v1/responses"), ("GET", "/v1/responses/r"),
    ("POST", "/v1/uploads"), ("GET", "/v1/assistants"), ("GET", "/v1/threads/t"), ("GET", "/v1/vector_stores"),
    ("POST", "/v1/fine_tuning/jobs"), ("GET", "/v1/organization/users"), ("GET", "/v1/chat/completions/c"),
    ("GET", "/v1/conversations/c"), ("GET", "/v1/containers"), ("GET", "/files"), ("GET", "//v1//files"),
    ("GET", "/v1/%66iles"), ("GET", "/v1/anything"), ("GET", "/"),
)  # fmt: skip
DODGES = (
    ("GET", "/v1/models/../files"), ("GET", "/v1/chat/../files"), ("GET", "/v1/audio/%2e%2e/files"),
    ("GET", "/v1/models/..%2ffiles"), ("GET", "/v1/./files"), ("GET", "/v1/images/%2E./files"),
    ("GET", "/files/../models/../files"),
)  # fmt: skip
STORED = (("GET", "/v1/chat/completions"), ("DELETE", "/v1/models/ft:gpt-4o:acme"))


@pytest.mark.parametrize(("method", "path"), STATELESS)
async def test_stateless_routes_of_a_shared_key(tenants: Rig, method: str, path: str) -> None:
    """Where tenants share a key, routes that keep nothing at the provider pass."""
    answer = await tenants.proxy.http.request(method, path, headers=bearer("acme-1"), json=chat_body(input="a"))
    assert answer.status_code != 403
    assert len(tenants.entries) == 1


@pytest.mark.parametrize("path", ["/v1/responses", "/responses", "//v1//responses/"])
async def test_a_response_that_is_not_stored_passes(tenants: Rig, path: str) -> None:
    """Where tenants share a key, `store: false` keeps nothing there, and its bytes are the client's."""
    body = b'{"model": "gpt-5.1", "input": "a", "store" : false, "previous_response_id": null}'
    await tenants.proxy.http.post(path, headers={**bearer("acme-1"), "content-type": "application/json"}, content=body)
    assert tenants.last.body == body


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b'{"input": "a"}', b'{"input": "a", "store": null}', b'{"input": "a", "store": "false"}',
        b'{"store": true, "store": false}', b'{"store": false, "Store": true}',
        b'{"store": false, "previous_response_id": "r"}', b'{"store": false, "conversation": {"id": "c"}}',
        b'{"store": false, "background": true}', b'{"metadata": {"store": false}}',
    ],
)  # fmt: skip
async def test_a_response_that_may_be_stored_is_refused(tenants: Rig, body: bytes) -> None:
    """Where tenants share a key: however `store` is spelled, and where it goes on from what was stored."""
    answer = await tenants.proxy.http.post("/v1/responses", headers=bearer("acme-1"), content=body)
    assert not tenants.entries
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "route_not_allowed")
    assert '"store": false' in answer.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), [*STATEFUL, *DODGES, *STORED])
async def test_other_routes_of_a_shared_key(tenants: Rig, method: str, path: str) -> None:
    """Where tenants share a key, routes under which one could reach another's data are a 403 and go nowhere."""
    async with dial(tenants.proxy.port) as wire:
        await wire.send(plain_request(b"{}", path=path, method=method, key="acme-1"))
        status, _, raw = await wire.response()
    assert not tenants.entries
    assert status == 403
    error = orjson.loads(raw)["error"]
    assert error["code"] == "route_not_allowed"
    assert "STRATA_TENANTS__ACME__UPSTREAM_KEY" in error["message"]


@pytest.mark.parametrize(("method", "path"), STATEFUL)
async def test_any_route_of_a_key_of_its_own(tenants: Rig, method: str, path: str) -> None:
    """A tenant with an upstream key of its own reaches every route, with that key."""
    async with dial(tenants.proxy.port) as wire:
        await wire.send(plain_request(b"{}", path=path, method=method, key="owner-1"))
        status, _, _ = await wire.response()
    assert status != 403
    assert tenants.last.key == "sk-owner"


async def test_budgets_are_per_tenant(tenants: Rig) -> None:
    """One tenant's budget cuts its requests and nobody else's."""
    words = "some words of history " * 60
    messages = [{"role": role, "content": f"{n} {words}"} for n in range(8) for role in ("user", "assistant")]
    body = {"model": MODEL, "messages": [*messages, {"role": "user", "content": "now?"}]}
    cut = await tenants.proxy.post(body, headers=bearer("acme-1"))
    assert int(cut.headers["x-strata-dropped-turns"]) > 0
    assert len(orjson.loads(tenants.last.body)["messages"]) < 17
    for key in ("beta-1", "owner-1", "watched-1"):
        whole = await tenants.proxy.post(body, headers=bearer(key))
        assert "x-strata-dropped-turns" not in whole.headers
        assert tenants.last.body == orjson.dumps(body)
    await tenants.proxy.settled(4)
    assert await tenants.proxy.total("strata_guard_actions_total", tenant="acme", action="turns_dropped") == 1


async def test_observe_tenant(tenants: Rig) -> None:
    """A tenant in observe mode gets its own bytes forwarded while another's repeats become references."""
    messages = [
        {"role": "user", "content": f"{ITEM}\n\nA?"}, {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": f"{ITEM}\n\nB?"},
    ]  # fmt: skip
    raw = orjson.dumps({"model": MODEL, "messages": messages, "stream": True})
    await tenants.proxy.post(raw, headers=bearer("watched-1"))
    assert tenants.last.body == raw[:-1] + USAGE_ASKED
    await tenants.proxy.post(raw, headers=bearer("beta-1"))
    assert b"Find them above" in tenants.last.body


Turns = list[dict[str, Any]]


async def converse(proxy: Proxy, key: str, conversation: str, **headers: str) -> tuple[Turns, bytes]:
    """Send an item in a first turn, leave it out of the history in a second; return that history and last body."""
    told = {"x-strata-conversation": conversation, **bearer(key), **headers}
    first = [{"role": "user", "content": f"{ITEM}\n\nWhat is planned?"}]
    answer = await proxy.post({"model": MODEL, "messages": first}, headers=told)
    reply = answer.json()["choices"][0]["message"]["content"]
    history = [{"role": "user", "content": "What is planned?"}, {"role": "assistant", "content": reply}]
    return history, orjson.dumps({"model": MODEL, "messages": [*history, {"role": "user", "content": "And then?"}]})


async def test_a_named_conversation_keeps_its_items(rig: Rig) -> None:
    """What a named conversation's client left out of its history is in front of its next turn."""
    _, second = await converse(rig.proxy, "key-a", "c1")
    answer = await rig.proxy.post(second, headers={"x-strata-conversation": "c1", **bearer("key-a")})
    assert b"The secret plan says many things." in rig.last.body
    assert answer.headers["x-strata-conversation"] == "c1"


@pytest.mark.parametrize(
    "other",
    [
        bearer("key-b"), {}, {**bearer("key-a"), "openai-organization": "org-b"}, {"api-key": "key-a"},
        {**bearer("key-a"), "x-openwebui-user-id": "someone-else"}, {"cookie": "session=other"},
    ],
)  # fmt: skip
async def test_nothing_is_shared_between_credentials(rig: Rig, other: dict[str, str]) -> None:
    """Another credential, organisation or end user with the same conversation id and words gets nothing of it."""
    _, second = await converse(rig.proxy, "key-a", "c1")
    headers = {"x-strata-conversation": "c1", "content-type": "application/json", **other}
    answer = await rig.proxy.http.post("/v1/chat/completions", content=second, headers=headers)
    assert answer.status_code == 200
    assert rig.last.body == second
    if "x-openwebui-user-id" not in other:
        # Its own turn only: the first one's turns are not counted here.
        await rig.proxy.settled(2)
        view = await rig.proxy.http.get("/strata/conversations/c1", headers=other)
        assert view.json()["requests"] == 1
        assert not view.json()["library"]


async def test_nothing_is_shared_between_tenants(tenants: Rig) -> None:
    """Two keys of one tenant share a conversation; two tenants do not."""
    _, second = await converse(tenants.proxy, "beta-1", "c1")
    for key in ("acme-1", "owner-1"):
        await tenants.proxy.post(second, headers={"x-strata-conversation": "c1", **bearer(key)})
        assert tenants.last.body == second
    _, second = await converse(tenants.proxy, "acme-1", "c2")
    await tenants.proxy.post(second, headers={"x-strata-conversation": "c2", **bearer("acme-2")})
    assert b"The secret plan says many things." in tenants.last.body


async def test_anonymous_requests_remember_nothing(rig: Rig) -> None:
    """Without a name nothing of an earlier request is forwarded, whatever `user` or `prompt_cache_key` say."""
    named = {"user": "u", "prompt_cache_key": "k", "safety_identifier": "s"}
    first = [{"role": "user", "content": f"{ITEM}\n\nWhat is planned?"}]
    answer = await rig.proxy.post({"model": MODEL, "messages": first, **named})
    reply = answer.json()["choices"][0]["message"]["content"]
    second = [{"role": "user", "content": "What is planned?"}, {"role": "assistant", "content": reply}]
    raw = orjson.dumps({"model": MODEL, "messages": [*second, {"role": "user", "content": "And?"}], **named})
    await rig.proxy.post(raw)
    assert rig.last.body == raw


async def _view(proxy: Proxy, key: str, path: str, method: str = "GET") -> httpx.Response:
    return await proxy.http.request(method, path, headers=bearer(key))


async def test_conversation_with_an_odd_name(rig: Rig) -> None:
    """A conversation named by the body in any script, with blanks and slashes, is found under its encoded path."""
    body = chat_body(strata={"conversation": "c/1 ü?"})
    answer = await rig.proxy.post(body, headers=bearer("key-a"))
    assert answer.headers["x-strata-conversation"] == "c/1 ??"
    await rig.proxy.settled(1)
    view = await _view(rig.proxy, "key-a", "/strata/conversations/c%2F1%20%C3%BC%3F")
    assert view.status_code == 200
    assert view.json()["id"] == "c/1 ü?"


@pytest.mark.parametrize("promotion", ["deferred", "eager"])
async def test_conversation_view(promotion: str) -> None:
    """The view of a named conversation tells layers, tokens, digests and counts, and no content."""
    async with rigged(PROMOTION=promotion) as rig:
        await view_of_a_conversation(rig, eager=promotion == "eager")


async def view_of_a_conversation(rig: Rig, *, eager: bool) -> None:
    _, second = await converse(rig.proxy, "key-a", "team/c1")
    await rig.proxy.post(second, headers={"x-strata-conversation": "team/c1", **bearer("key-a")})
    await rig.proxy.settled(2)
    for path in ("/strata/conversations/team/c1", "/strata/conversations/team%2Fc1"):
        answer = await _view(rig.proxy, "key-a", path)
        assert answer.status_code == 200
        view = answer.json()
        assert view["id"] == "team/c1"
        assert view["requests"] == 2
        assert view["turns"] == 2
        assert view["prompt_tokens"] > 400
        assert {layer["layer"] for layer in view["layers"]} >= {"L1", "L2", "L3", "L4", "L5"}
        weights = {layer["layer"]: layer["tokens"] for layer in view["layers"]}
        assert (weights["L2"] > 200, weights["L4"] > 200, weights["L5"] > 0) == (eager, not eager, True)
        assert [item["id"] for item in view["library"]] == ["secret-plan.md"] * eager
        assert "many things" not in answer.text
        assert "key-a" not in answer.text


async def test_conversation_deletion(rig: Rig) -> None:
    """A deleted conversation is unknown, and nothing of it is forwarded again; only its key may delete it."""
    _, second = await converse(rig.proxy, "key-a", "c1")
    await rig.proxy.settled(1)
    path = "/strata/conversations/c1"
    assert (await _view(rig.proxy, "key-b", path, "DELETE")).status_code == 404
    assert (await _view(rig.proxy, "key-a", path)).status_code == 200
    gone = await _view(rig.proxy, "key-a", path, "DELETE")
    assert gone.json() == {"id": "c1", "object": "conversation.deleted", "deleted": True}
    for method in ("GET", "DELETE"):
        missing = await _view(rig.proxy, "key-a", path, method)
        assert missing.status_code == 404
        openai_shape(missing, "not_found")
    await rig.proxy.post(second, headers={"x-strata-conversation": "c1", **bearer("key-a")})
    assert rig.last.body == second


async def test_digests_only() -> None:
    """With `REMEMBER_CONTENT=false` nothing that was left out is forwarded."""
    async with rigged(REMEMBER_CONTENT="false") as rig:
        _, second = await converse(rig.proxy, "key-a", "c1")
        await rig.proxy.post(second, headers={"x-strata-conversation": "c1", **bearer("key-a")})
        assert rig.last.body == second


async def test_admin_token() -> None:
    """With an admin token `/metrics` asks for it, and for nothing else; without one it is open."""
    async with rigged(ADMIN_TOKEN="the-admin-token") as rig:
        http = rig.proxy.http
        for headers in (
            {},
            bearer("wrong"),
            {"authorization": "Basic the-admin-token"},
            {"api-key": "the-admin-token"},
        ):
            refused = await http.get("/metrics", headers=headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert "strata_requests_total" not in refused.text
            assert "the-admin-token" not in refused.text
        assert "strata_requests_total" in (await http.get("/metrics", headers=bearer("the-admin-token"))).text
        assert (await http.get("/livez")).status_code == 200
        assert (await http.get("/readyz")).status_code == 200


async def test_admin_token_is_no_tenants_key() -> None:
    """The admin token opens no tenant's routes, and a tenant's key not the metrics."""
    async with rigged(ADMIN_TOKEN="the-admin-token", **TENANTS) as rig:
        assert (await rig.proxy.post(chat_body(), headers=bearer("the-admin-token"))).status_code == 401
        assert (await rig.proxy.http.get("/metrics", headers=bearer("acme-1"))).status_code == 401


@pytest.fixture
async def recorded() -> AsyncIterator[tuple[Scripted, Proxy]]:
    """A proxy with a held key before an upstream that keeps raw headers."""
    async with scripted(always(COMPLETION)) as upstream, strata(upstream.url, UPSTREAM_KEY="sk-held") as proxy:
        yield upstream, proxy


async def test_two_authorization_headers(recorded: tuple[Scripted, Proxy]) -> None:
    """A client that sends its credential twice gets neither upstream when a key is held."""
    upstream, proxy = recorded
    async with dial(proxy.port) as wire:
        for path in ("/v1/chat/completions", "/v1/embeddings"):
            raw = plain_request(orjson.dumps(chat_body()), "Authorization: Bearer again", path=path)
            await wire.send(raw)
            await wire.response()
            assert upstream.got[-1].all("authorization") == ["Bearer sk-held"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
@pytest.mark.parametrize("held", [False, True])
async def test_whose_account_it_was_is_not_told(path: str, held: bool) -> None:
    """Where the proxy holds the key: the client's own account is no secret to it."""
    told = {"openai-organization": "acme-inc", "openai-project": "p", "set-cookie": "__cf_bm=1", "openai-version": "2"}
    answers = always(COMPLETION, headers=[f"{name}: {value}" for name, value in told.items()])
    more = {"UPSTREAM_KEY": "sk-held"} if held else {}
    async with scripted(answers) as upstream, strata(upstream.url, **more) as proxy:
        answer = await proxy.post(chat_body(), path=path)
        assert answer.headers["openai-version"] == "2"
        assert [name in answer.headers for name in list(told)[:3]] == [not held] * 3


RESTRICTED = {
    "TENANTS__ACME__KEYS": "acme-1",
    "TENANTS__ACME__MODELS": "gpt-4*, Text-Embedding-3-small",
    "TENANTS__ACME__UPSTREAM_KEY": "sk-own",
}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", chat_body(model="gpt-4.1"), 200),
        ("/v1/chat/completions", chat_body(model="GPT-4.1"), 200),
        ("/v1/chat/completions", chat_body(), 404),
        ("/v1/chat/completions", chat_body(model=""), 404),
        ("/openai/deployments/gpt-5.1/chat/completions", chat_body(model="gpt-4.1"), 404),
        ("/v1/chat/completions", b'{"model":"gpt-4.1","messages":[],"model":"gpt-5.1"}', 404),
        ("/v1/chat/completions", b'{"model":"gpt-4.1","messages":[],"model":"gpt\\u002d5.1"}', 404),
        ("/v1/chat/completions", b'{"model":"gpt-4.1","messages":[],"MODEL":"gpt-5.1"}', 404),
        ("/v1/chat/completions", chat_body(model="gpt-4.1", models=["gpt-4o", "gpt-5.1"]), 404),
        ("/v1/chat/completions", chat_body(model="gpt-4.1", models=["gpt-4o"]), 200),
        ("/v1/realtime/client_secrets", {"session": {"model": "gpt-5.1"}}, 404),
        ("/v1/realtime/client_secrets", {"expires_after": {}}, 404),
        ("/v1/embeddings", {"model": "text-embedding-3-small", "input": "a"}, 200),
        ("/v1/embeddings", {"model": "text-embedding-3-large", "input": "a"}, 404),
        ("/v1/responses", {"model": "gpt-5.1", "input": "a"}, 404),
        ("/v1/responses", {"model": "gpt-4.1", "input": "a"}, 200),
        ("/v1/audio/speech", {"input": "a"}, 404),
        ("/v1/moderations", {"input": "a"}, 200),
    ],
)
async def test_a_tenant_may_ask_for_its_models_only(path: str, body: object, status: int) -> None:
    """404 as OpenAI has it, on every route and in whatever place a model is named; nothing is forwarded."""
    async with rigged(**RESTRICTED) as rig:
        answer = await rig.proxy.post(body, path=path, headers=bearer("acme-1"))
        assert answer.status_code == status, answer.text
        if status == 404:
            openai_shape(answer, "model_not_found")
            assert not rig.entries
        else:
            assert rig.last.body == (body if isinstance(body, bytes) else orjson.dumps(body))


def _form(*parts: tuple[str, bytes]) -> bytes:
    held = [f"--b\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + value for head, value in parts]
    return b"\r\n".join([*held, b"--b--\r\n"])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (_form(('name="model"', b"gpt-4o-transcribe"), ('name="file"; filename="model"', b"RIFF")), 200),
        (_form(('name="model"', b"whisper-1"), ('name="file"; filename="a.wav"', b"RIFF")), 404),
        (_form(("name=model", b"whisper-1")), 404),
        (_form(("name*=utf-8''model", b"whisper-1")), 404),
        (_form(('name="model"', b"gpt-4o"), (f'x="{"y" * 400}"; name="model"', b"whisper-1")), 404),
        (_form(('name="model"', b"gpt-4o"), (f'x="{"y" * 9_000}"; name="model"', b"whisper-1")), 404),
        (_form(('name="file"', b"RIFF")), 404),
        (b'content-disposition:name="model"' * 100_000, 404),
    ],
)
async def test_a_form_names_its_model(body: bytes, status: int) -> None:
    """In whatever way a part is named, and without holding up others."""
    async with rigged(**RESTRICTED) as rig:
        headers = {**bearer("acme-1"), "content-type": "multipart/form-data; boundary=b"}
        async with asyncio.timeout(5):
            answer = await rig.proxy.http.post("/v1/audio/transcriptions", content=body, headers=headers)
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    "path",
    ["/openai/deployments/gpt-4o/../gpt-5.1/chat/completions", "/v1/files/../../admin", "/v1/%2e%2e/%2E%2e/admin"],
)
async def test_no_path_leads_out_of_the_upstreams_base(path: str) -> None:
    """Whoever decodes it would take it for another one."""
    async with rigged(**RESTRICTED) as rig, dial(rig.proxy.port) as wire:
        await wire.send(plain_request(orjson.dumps(chat_body(model="gpt-4o")), path=path, key="acme-1"))
        status, _, told = await wire.response()
        assert (status, orjson.loads(told)["error"]["code"]) in {(400, "invalid_value"), (404, "model_not_found")}
        assert not rig.entries


async def test_models_may_be_listed_by_whoever_may_use_some(tenants: Rig) -> None:
    """A list of models names none that is asked for."""
    async with rigged(**RESTRICTED) as rig:
        assert (await rig.proxy.http.get("/v1/models", headers=bearer("acme-1"))).status_code == 200


async def test_a_key_may_be_given_by_its_digest() -> None:
    """The digest itself opens nothing."""
    digest = hashlib.sha256(b"acme-1").hexdigest()
    async with rigged(TENANTS__ACME__KEYS=f"sha256:{digest.upper()},plain-1") as rig:
        assert (await rig.proxy.post(chat_body(), headers=bearer("acme-1"))).status_code == 200
        assert (await rig.proxy.post(chat_body(), headers=bearer("plain-1"))).status_code == 200
        for wrong in (digest, f"sha256:{digest}", digest.upper()):
            assert (await rig.proxy.post(chat_body(), headers=bearer(wrong))).status_code == 401


async def test_a_tenant_may_have_its_own_upstream() -> None:
    """Everybody's key does not go there; its own does."""
    async with scripted(always(COMPLETION)) as other, rigged(**TENANTS, TENANTS__FAR__KEYS="far-1,far-2",
                                                             TENANTS__FAR__UPSTREAM_URL=other.url) as rig:  # fmt: skip
        assert (await rig.proxy.post(chat_body(), headers=bearer("far-1"))).status_code == 200
        assert (await rig.proxy.post({"input": "a"}, path="/v1/embeddings", headers=bearer("far-2"))).status_code == 200
        assert not rig.entries
        assert [got.all("authorization") for got in other.got] == [[], []]
        assert (await rig.proxy.post(chat_body(), headers=bearer("beta-1"))).status_code == 200
        assert len(rig.entries) == 1


async def test_what_a_tenant_keeps_is_its_own_choice() -> None:
    """Nothing of its conversations' content, while another's is kept."""
    chat = [{"role": "user", "content": f"{ITEM}\nWhat is it?"}]
    async with rigged(**TENANTS, TENANTS__BETA__REMEMBER_CONTENT="false") as rig:
        for key, kept in (("owner-1", True), ("beta-1", False)):
            headers = {**bearer(key), "x-strata-conversation": "c1"}
            first = await rig.proxy.post(chat_body(messages=chat), headers=headers)
            bare = [{"role": "user", "content": "What is it?"}, first.json()["choices"][0]["message"]]
            await rig.proxy.post(chat_body(messages=[*bare, {"role": "user", "content": "Sure?"}]), headers=headers)
            assert (b"secret plan" in rig.last.body) == kept


@pytest.mark.parametrize(("ttl", "kept"), [("1", False), ("60", True)])
async def test_how_long_a_tenant_keeps_is_its_own_choice(redis_url: str, ttl: str, kept: bool) -> None:
    """In Redis and in the process, whatever is for everybody."""
    options = {"REDIS_URL": redis_url, "SECRET": "s", "CONVERSATION_TTL_SECONDS": "30"}
    async with rigged(**TENANTS, TENANTS__BETA__CONVERSATION_TTL_SECONDS=ttl, **options) as rig:
        headers = {**bearer("beta-1"), "x-strata-conversation": f"kept-{ttl}"}
        await rig.proxy.post(chat_body(), headers=headers)
        await asyncio.sleep(1.6)
        answer = await rig.proxy.http.get(f"/strata/conversations/kept-{ttl}", headers=bearer("beta-1"))
        assert (answer.status_code == 200) == kept


async def test_an_own_mode_reserve_and_rule_over_budget() -> None:
    """One tenant is refused what another is let through with."""
    options = {**TENANTS, "TENANTS__BETA__BUDGET_TOKENS": "900", "TENANTS__BETA__OVER_BUDGET": "reject",
               "TENANTS__BETA__OUTPUT_RESERVE_TOKENS": "500", "TENANTS__OWNER__BUDGET_TOKENS": "900"}  # fmt: skip
    async with rigged(**options) as rig:
        long = chat_body("word " * 500)
        assert (await rig.proxy.post(long, headers=bearer("beta-1"))).status_code == 400
        assert (await rig.proxy.post(long, headers=bearer("owner-1"))).status_code == 200
