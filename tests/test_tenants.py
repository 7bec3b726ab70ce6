"""Who a request belongs to."""

import pytest

from proxy.environment import load
from proxy.errors import StrataError
from proxy.tenants import DEFAULT, Tenant, Tenants

TWO = {
    "STRATA_UPSTREAM_KEY": "sk-shared",
    "STRATA_TENANTS__ACME__KEYS": "sk-a1,sk-a2",
    "STRATA_TENANTS__ACME__BUDGET_TOKENS": "9000",
    "STRATA_TENANTS__ACME__MODE": "observe",
    "STRATA_TENANTS__BETA__KEYS": "sk-b",
}


def tenants(**given: str) -> Tenants:
    return Tenants(load({f"STRATA_{name}": value for name, value in given.items()}))


def resolve(found: Tenants, key: str) -> Tenant:
    return found.resolve({"authorization": f"Bearer {key}"})


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"authorization": "Bearer sk-a1"}, "acme"),
        ({"authorization": "Bearer sk-a2"}, "acme"),
        ({"authorization": "bearer   sk-b "}, "beta"),
        ({"api-key": "sk-b"}, "beta"),
        ({"x-api-key": "sk-a1"}, "acme"),
        ({"x-goog-api-key": "sk-a1"}, "acme"),
        ({"authorization": "Basic abc", "api-key": "sk-b"}, "beta"),
    ],
)
def test_a_key_selects_its_tenant(headers: dict[str, str], name: str) -> None:
    """In whatever header an SDK sends it."""
    found = Tenants(load(TWO)).resolve(headers)
    assert (found.name, found.owner) == (name, name)
    assert found.hides_credentials


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer sk-other"},
        {"authorization": "Bearer "},
        {"authorization": "sk-a1"},
        {"authorization": "Bearer sk-a1,sk-a2"},
        {"authorization": "Bearer SK-A1"},
        {"api-key": ""},
        {"authorization": "Bearer sk-\udce9"},
    ],
)
def test_an_unknown_key_is_refused(headers: dict[str, str]) -> None:
    """401 in the OpenAI shape, and the key is not repeated."""
    with pytest.raises(StrataError) as caught:
        Tenants(load(TWO)).resolve(headers, query="key=sk-a1")
    assert (caught.value.fault.status, caught.value.fault.code) == (401, "invalid_api_key")
    assert "sk-" not in caught.value.message


def test_a_tenants_settings_are_its_own() -> None:
    """What is not set is as for everybody."""
    found = Tenants(load({**TWO, "STRATA_BUDGET_TOKENS": "70000", "STRATA_OVER_BUDGET": "reject"}))
    acme, beta = resolve(found, "sk-a1").policy, resolve(found, "sk-b").policy
    assert (acme.mode, acme.budget_tokens, acme.over_budget) == ("observe", 9_000, "reject")
    assert (beta.mode, beta.budget_tokens, beta.over_budget) == ("layered", 70_000, "reject")
    assert found.names == ("acme", "beta")


@pytest.mark.parametrize(
    ("keys", "upstream", "shared"),
    [
        pytest.param({}, ("sk-shared", "sk-shared"), (True, True), id="one key for both"),
        pytest.param({"ACME": "sk-own"}, ("sk-own", "sk-shared"), (False, False), id="one has its own"),
        pytest.param({"ACME": "sk-x", "BETA": "sk-y"}, ("sk-x", "sk-y"), (False, False), id="each its own"),
        pytest.param({"ACME": "sk-x", "BETA": "sk-x"}, ("sk-x", "sk-x"), (True, True), id="the same one twice"),
        pytest.param({"ACME": "sk-shared"}, ("sk-shared", "sk-shared"), (True, True), id="the common one again"),
    ],
)
def test_who_shares_an_upstream_key(keys: dict[str, str], upstream: tuple[str, str], shared: tuple[bool, bool]) -> None:
    """Where two tenants are one at the upstream, what is stored there is kept from both."""
    found = Tenants(load({**TWO, **{f"STRATA_TENANTS__{name}__UPSTREAM_KEY": key for name, key in keys.items()}}))
    both = resolve(found, "sk-a1"), resolve(found, "sk-b")
    assert tuple(tenant.upstream_key for tenant in both) == upstream
    assert tuple(tenant.shares_key for tenant in both) == shared


def test_a_single_tenant_shares_with_nobody() -> None:
    """All routes are its own."""
    found = resolve(tenants(UPSTREAM_KEY="sk-up", TENANTS__ACME__KEYS="k"), "k")
    assert (found.upstream_key, found.shares_key) == ("sk-up", False)


def test_without_tenants_the_clients_key_passes_through() -> None:
    """`default` is only a label: the owner is the whole credential."""
    found = tenants().resolve({"authorization": "Bearer sk-1", "accept": "x"})
    assert (found.name, found.upstream_key, found.hides_credentials, found.shares_key) == (DEFAULT, None, False, False)
    assert found.owner == {"authorization": "Bearer sk-1"}


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"authorization": "Bearer 1"}, {"authorization": "Bearer 2"}),
        ({"authorization": "Bearer 1"}, {"api-key": "Bearer 1"}),
        ({"authorization": "Bearer 1"}, {"authorization": "Bearer 1", "openai-organization": "o"}),
        ({"authorization": "Bearer 1"}, {"authorization": "Bearer 1", "openai-project": "p"}),
        ({"cookie": "c"}, {"cookie": "d"}),
        ({"cookie": "c", "x-subscription-tier": "free"}, {"cookie": "d", "x-subscription-tier": "free"}),
        ({"cookie": "c", "x-csrf-token": "t"}, {"cookie": "d", "x-csrf-token": "t"}),
        ({"authorization": "Bearer 1"}, {}),
        *(
            ({"authorization": "Bearer EMPTY", name: "1"}, {"authorization": "Bearer EMPTY", name: "2"})
            for name in (
                "ocp-apim-subscription-key",
                "x-portkey-api-key",
                "cf-aig-authorization",
                "helicone-auth",
                "x-litellm-api-key",
                "x-auth-token",
                "x-access-token",
                "proxy-authorization",
                "x-amz-security-token",
                "x-functions-key",
                "x-vendors-new-secret",
                "x-jwt",
            )
        ),
    ],
)
def test_two_credentials_share_nothing(one: dict[str, str], two: dict[str, str]) -> None:
    """Not even where they differ in a header or an organisation alone."""
    found = tenants()
    assert found.resolve(one).owner != found.resolve(two).owner
    assert found.resolve(one).owner == found.resolve({**one, "accept": "x", "user-agent": "y"}).owner


def test_a_cookie_beside_a_key_says_nothing() -> None:
    """Load balancers set a new one with every answer."""
    found = tenants()
    key = {"authorization": "Bearer 1", "openai-project": "p"}
    assert found.resolve(key).owner == found.resolve({**key, "cookie": "c"}).owner


def test_a_key_in_the_query_is_a_credential() -> None:
    """As one provider's clients send it."""
    found = tenants()
    assert found.resolve({}, query="key=1").owner != found.resolve({}, query="key=2").owner
    for name in ("api-key", "subscription-key", "access_token", "code", "token", "sig"):
        one, two = (found.resolve({}, query=f"api-version=1&{name}={value}") for value in "12")
        assert one.owner != two.owner
    assert found.resolve({}, query="page=1&page_token=2").owner == found.resolve({}).owner


@pytest.mark.parametrize("name", ["idempotency-key", "cf-aig-cache-key", "x-author", "x-max-tokens", "x-request-id"])
def test_what_a_request_bears_for_itself_is_no_credential(name: str) -> None:
    """Its client is the same with each of them."""
    key = {"authorization": "Bearer 1"}
    assert tenants().resolve({**key, name: "a"}).owner == tenants().resolve({**key, name: "b"}).owner


def test_a_held_key_replaces_the_clients() -> None:
    """Without tenants on loopback, the proxy's key goes upstream in the client's place."""
    assert tenants(UPSTREAM_KEY="sk-up").resolve({"authorization": "Bearer x"}).upstream_key == "sk-up"


def test_nobody_has_no_key() -> None:
    """Before a request's key has been looked at nothing goes anywhere in anybody's name."""
    nobody = tenants(UPSTREAM_KEY="sk-up").nobody
    assert (nobody.name, nobody.owner, nobody.upstream_key) == (DEFAULT, {}, None)
    assert nobody.hides_credentials
    assert nobody.shares_key
