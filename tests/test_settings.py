"""Every setting, from the environment: read, refused, shown."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from proxy.environment import Effective, SettingsError, effective, environment, load
from proxy.memory.local import LocalStore
from proxy.memory.redis import RedisStore
from proxy.settings import Settings


def refusal(given: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        load(given)
    return str(caught.value)


def values(given: dict[str, str]) -> dict[str, Any]:
    return load(given).model_dump()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("upstream_url", "https://api.openai.com/v1"),
        ("upstream_key", None),
        ("redis_url", None),
        ("host", "127.0.0.1"),
        ("port", 8080),
        ("workers", 1),
        ("log_level", "info"),
        ("mode", "layered"),
        ("promotion", "deferred"),
        ("budget_tokens", None),
        ("output_reserve_tokens", 4_096),
        ("over_budget", "forward"),
        ("conversation_headers", ("x-session-id", "x-openwebui-chat-id")),
        ("remember_content", True),
        ("conversation_ttl_seconds", 86_400),
        ("secret", None),
        ("allow_open", False),
        ("context_tags", ()),
        ("max_body_bytes", 33_554_432),
        ("admin_token", None),
        ("tenants", {}),
    ],
)
def test_defaults_are_the_issues(name: str, value: object) -> None:
    """Nothing set is a proxy for OpenAI's API on loopback."""
    assert getattr(load({}), name) == value


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("UPSTREAM_URL", "http://127.0.0.1:8081/v1/", "http://127.0.0.1:8081/v1/"),
        ("HOST", "::1", "::1"),
        ("PORT", "0", 0),
        ("WORKERS", "4", 4),
        ("LOG_LEVEL", "debug", "debug"),
        ("MODE", "observe", "observe"),
        ("PROMOTION", "eager", "eager"),
        ("BUDGET_TOKENS", "50000", 50_000),
        ("OUTPUT_RESERVE_TOKENS", "100", 100),
        ("OVER_BUDGET", "reject", "reject"),
        ("CONVERSATION_HEADERS", " X-Chat , x-thread,,", ("x-chat", "x-thread")),
        ("USER_HEADERS", "X-User", ("x-user",)),
        ("REMEMBER_CONTENT", "false", False),
        ("CONVERSATION_TTL_SECONDS", "60", 60),
        ("ALLOW_OPEN", "true", True),
        ("CONTEXT_TAGS", "wiki, ticket.v2", ("wiki", "ticket.v2")),
        ("MAX_BODY_BYTES", "2048", 2_048),
        ("CONNECT_TIMEOUT_SECONDS", "0.5", 0.5),
        ("FIRST_BYTE_TIMEOUT_SECONDS", "30", 30.0),
        ("IDLE_TIMEOUT_SECONDS", "30", 30.0),
        ("SHUTDOWN_SECONDS", "0", 0),
        ("MEMORY_BYTES", "1000000", 1_000_000),
        ("UPSTREAM_PROXY", "http://proxy:3128", SecretStr("http://proxy:3128")),
    ],
)
def test_each_variable_is_read(variable: str, text: str, value: object) -> None:
    """By its name, in either case."""
    assert getattr(load({f"STRATA_{variable}": text}), variable.lower()) == value
    assert getattr(load({f"strata_{variable}".lower(): text}), variable.lower()) == value


@pytest.mark.parametrize("name", [name for name in Settings.model_fields if name != "tenants"])
def test_an_empty_variable_is_not_set(name: str) -> None:
    """As a compose file passes on what nobody has set."""
    assert values({f"STRATA_{name.upper()}": ""}) == values({})


@pytest.mark.parametrize("variable", ["UPSTREAM_KEY", "REDIS_URL", "SECRET", "ADMIN_TOKEN"])
def test_secrets_are_read_and_never_shown(variable: str) -> None:
    """Neither by `repr` nor in the list of effective settings."""
    given = {f"STRATA_{variable}": "redis://user:hunter2@host/0"}
    settings = load(given)
    assert getattr(settings, variable.lower()).get_secret_value() == "redis://user:hunter2@host/0"
    shown = effective(settings, given)
    assert Effective(f"STRATA_{variable}", "********", "environment") in shown
    assert "hunter2" not in repr(settings) + repr(shown)


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("UPSTREAM_URL", "api.openai.com", "http"),
        ("UPSTREAM_URL", "ftp://x", "http"),
        ("UPSTREAM_URL", "http:///v1", "http"),
        ("PORT", "http", "integer"),
        ("PORT", "70000", "65535"),
        ("PORT", "-1", "0"),
        ("WORKERS", "0", "1"),
        ("WORKERS", "257", "256"),
        ("LOG_LEVEL", "loud", "'debug', 'info', 'warning' or 'error'"),
        ("MODE", "fast", "'layered' or 'observe'"),
        ("PROMOTION", "never", "'deferred' or 'eager'"),
        ("BUDGET_TOKENS", "0", "greater than 0"),
        ("BUDGET_TOKENS", "50k", "integer"),
        ("OUTPUT_RESERVE_TOKENS", "-5", "greater than 0"),
        ("OVER_BUDGET", "drop", "'forward' or 'reject'"),
        ("REMEMBER_CONTENT", "sometimes", "true or false"),
        ("CONVERSATION_TTL_SECONDS", "0", "greater than 0"),
        ("MEMORY_BYTES", "10", "1000000"),
        ("ALLOW_OPEN", "2", "true or false"),
        ("CONTEXT_TAGS", "wiki,a b", "tag names"),
        ("CONTEXT_TAGS", "<wiki>", "tag names"),
        ("MAX_BODY_BYTES", "1", "1024"),
        ("CONNECT_TIMEOUT_SECONDS", "0", "greater than 0"),
        ("FIRST_BYTE_TIMEOUT_SECONDS", "soon", "number"),
        ("IDLE_TIMEOUT_SECONDS", "-1", "greater than 0"),
        ("IDLE_TIMEOUT_SECONDS", "nan", "finite"),
        ("PROMPT_CACHE_LIFETIME_SECONDS", "inf", "finite"),
        ("TENANTS__ACME__CONVERSATION_TTL_SECONDS", "inf", "finite"),
        ("CACHED_READ_PRICE", "nan", "less than or equal to 1"),
        ("USD_PER_DAY", "inf", "finite"),
        ("MODELS", ",", "at least one name"),
        ("MODELS", " , ", "at least one name"),
        ("TENANTS__ACME__MODELS", ",", "at least one name"),
        ("UPSTREAM_URL", "http://upstream test/v1", "without blanks"),
        ("UPSTREAM_URL", " http://upstream.test/v1", "without blanks"),
        ("TENANTS__ACME__UPSTREAM_URL", "http://upstream.test/v1\n", "without blanks"),
        ("CONVERSATION_HEADERS", "x-chat,x chat", "header names"),
        ("CONVERSATION_HEADERS", "x-chat:", "header names"),
        ("USER_HEADERS", "x-b\u00e9", "header names"),
        ("TENANTS__ACME__WINDOWED", "maybe", "true or false"),
        ("SHUTDOWN_SECONDS", "-1", "0"),
        ("TENANTS__ACME__BUDGET_TOKENS", "0", "greater than 0"),
        ("TENANTS__ACME__MODE", "fast", "'layered' or 'observe'"),
    ],
)
def test_a_bad_value_is_refused(variable: str, value: str, allowed: str) -> None:
    """With the variable's name, the value and what is allowed, on one line."""
    keys = {"STRATA_TENANTS__ACME__KEYS": "k"} if variable.startswith("TENANTS") else {}
    said = refusal({f"STRATA_{variable}": value, **keys})
    assert said.startswith(f"STRATA_{variable} is {value!r}: ")
    assert allowed in said
    assert "\n" not in said


@pytest.mark.parametrize("variable", ["REDIS_URL", "UPSTREAM_PROXY", "UPSTREAM_URL"])
def test_a_password_with_a_slash_is_not_shown(variable: str) -> None:
    """A URL that cannot be taken apart may hold one where a port would stand."""
    scheme = "redis" if variable == "REDIS_URL" else "http"
    said = refusal({f"STRATA_{variable}": f"{scheme}://default:S3cret/Pass@host"})
    assert "port" in said
    assert "S3cret" not in said or variable == "UPSTREAM_URL"


def test_a_bad_secret_is_refused_without_showing_it() -> None:
    """A Redis URL and a forward proxy's may hold a password."""
    for variable, allowed in (("STRATA_REDIS_URL", "redis://"), ("STRATA_UPSTREAM_PROXY", "http://")):
        said = refusal({variable: "user:hunter2@host"})
        assert said.startswith(f"{variable}: ")
        assert allowed in said
        assert "hunter2" not in said


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:6379?foo=bar",
        "redis://h:6379?db=one",
        "redis://h:6379?db",
        "redis://h:6379?ssl_ca_certs=/ca.pem",
        "rediss://h:6379?ssl_cert_reqs=hunter3",
        "unix:///redis.sock?password=hunter4&path=/another",
    ],
)
def test_a_redis_url_with_an_option_that_no_connection_takes(url: str) -> None:
    """It is refused when it is read, not when the first connection is made, and is not repeated."""
    said = refusal({"STRATA_REDIS_URL": url})
    assert said.startswith("STRATA_REDIS_URL: a URL whose query holds no more than db, username, password")
    assert "hunter" not in said
    assert ("ssl_ca_certs" in said) == url.startswith("rediss")


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:p@h:6379/1?db=2&client_name=a&health_check_interval=5&max_connections=9",
        "redis://h?socket_timeout=0.5&socket_connect_timeout=1&username=u&password=p",
        "unix:///redis.sock?db=1&password=p",
        "rediss://h?ssl_ca_certs=/a&ssl_ca_path=/b&ssl_certfile=/c&ssl_keyfile=/d&ssl_password=e&ssl_cert_reqs=none"
        "&ssl_check_hostname=false&ssl_min_version=772&ssl_ciphers=a",
    ],
)
async def test_a_redis_url_that_is_taken_makes_connections(url: str) -> None:
    """What the settings allow the client takes too."""
    given = load({"STRATA_REDIS_URL": url}).redis_url
    assert given is not None
    copy = LocalStore(max_bytes=1_000, ttl_seconds=1, clock=lambda: 0.0)
    store = RedisStore(
        given.get_secret_value(), copy=copy, ttl_seconds=1, on_error=lambda _: None, on_state=lambda _: None
    )
    for client in (store._redis, store._pings):
        client.connection_pool.make_connection()
    await store.close()


def test_all_that_is_wrong_is_said_at_once() -> None:
    """One line for each."""
    said = refusal({"STRATA_MODE": "fast", "STRATA_PORT": "x"})
    assert sorted(line.split(" ")[0] for line in said.splitlines()) == ["STRATA_MODE", "STRATA_PORT"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param(
            "STRATA_BUDGET_TOKEN", "STRATA_BUDGET_TOKEN: no such setting; did you mean STRATA_BUDGET_TOKENS?", id="near"
        ),
        pytest.param("STRATA_XYZZY", "STRATA_XYZZY: no such setting", id="far"),
        pytest.param("STRATA_TENANTS", "STRATA_TENANTS: no such setting", id="tenants as a whole"),
        pytest.param("STRATA_TENANTS__ACME__KEY", "did you mean STRATA_TENANTS__ACME__KEYS?", id="a tenant's field"),
        pytest.param("STRATA_TENANTS__ACME", "a tenant has KEYS, MODELS,", id="no field"),
        pytest.param("STRATA_TENANTS____KEYS", "STRATA_TENANTS____KEYS: no such setting", id="no name"),
        pytest.param("STRATA_", "STRATA_: no such setting", id="nothing"),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion(name: str, says: str) -> None:
    """A misspelled setting never goes unnoticed."""
    said = refusal({name: "1"})
    assert said.startswith(f"{name}: no such setting")
    assert says in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STRATA_SERVICE_HOST", "10.0.0.1"),
        ("STRATA_SERVICE_PORT", "8080"),
        ("STRATA_SERVICE_PORT_HTTP", "8080"),
        ("STRATA_PORT", "tcp://10.0.0.1:8080"),
        ("STRATA_PORT", "udp://10.0.0.1:8080"),
        ("STRATA_PORT_8080_TCP", "tcp://10.0.0.1:8080"),
        ("STRATA_PORT_8080_TCP_ADDR", "10.0.0.1"),
        ("STRATA_PORT_8080_TCP_PROTO", "tcp"),
        ("STRATA_PORT_8080_UDP_PORT", "8080"),
        ("STRATA_REDIS_SERVICE_HOST", "10.0.0.2"),
        ("STRATA_REDIS_PORT", "tcp://10.0.0.2:6379"),
        ("STRATA_REDIS_PORT_6379_TCP", "tcp://10.0.0.2:6379"),
        ("STRATA_REDIS_PORT_6379_TCP_ADDR", "10.0.0.2"),
        ("PATH", "/bin"),
        ("STRATAGEM", "x"),
    ],
)
def test_what_kubernetes_puts_there_is_no_setting(name: str, value: str) -> None:
    """Service links of a Service named strata, or strata-redis beside it; and names of others."""
    assert values({name: value}) == values({})


def test_effective_lists_every_setting_and_its_source() -> None:
    """In the order of the configuration table; tenants by their variables, secrets masked."""
    given = {
        "STRATA_MODE": "observe",
        "STRATA_TENANTS__ACME__KEYS": "sk-1,sk-2",
        "STRATA_TENANTS__ACME__BUDGET_TOKENS": "9000",
    }
    lines = effective(load(given), given)
    names = [line.name for line in lines]
    assert names[: len(Settings.model_fields) - 1] == [
        f"STRATA_{name.upper()}" for name in Settings.model_fields if name != "tenants"
    ]
    by_name = {line.name: line for line in lines}
    assert by_name["STRATA_MODE"] == Effective("STRATA_MODE", "observe", "environment")
    assert by_name["STRATA_REMEMBER_CONTENT"] == Effective("STRATA_REMEMBER_CONTENT", "true", "default")
    assert by_name["STRATA_CONVERSATION_HEADERS"].value == "x-session-id,x-openwebui-chat-id"
    assert by_name["STRATA_BUDGET_TOKENS"].value == ""
    assert by_name["STRATA_TENANTS__ACME__KEYS"].value == "********,********"
    assert by_name["STRATA_TENANTS__ACME__BUDGET_TOKENS"].value == "9000"
    assert "STRATA_TENANTS__ACME__MODE" not in by_name


def test_every_field_says_what_it_is() -> None:
    """The descriptions are the README's table."""
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        pytest.param({"STRATA_TENANTS__ACME__BUDGET_TOKENS": "9"}, "STRATA_TENANTS__ACME__KEYS: ", id="no keys"),
        pytest.param({"STRATA_TENANTS__ACME__KEYS": ","}, "STRATA_TENANTS__ACME__KEYS: at least one key", id="no key"),
        pytest.param(
            {"STRATA_TENANTS__ACME__KEYS": "sk-1,sk-9", "STRATA_TENANTS__BETA__KEYS": "sk-9"},
            "STRATA_TENANTS__BETA__KEYS: a key is also tenant ACME's",
            id="a key of two tenants",
        ),
        pytest.param(
            {"STRATA_TENANTS__ACME LTD__KEYS": "sk-9"},
            "STRATA_TENANTS: names without blanks; STRATA_TENANTS__ACME LTD__",
            id="a blank in a name",
        ),
    ],
)
def test_tenants_that_cannot_be(given: dict[str, str], says: str) -> None:
    """Each problem names its variable and shows no key."""
    said = refusal(given)
    assert said.startswith(says)
    assert "sk-9" not in said


def test_tenants_are_read() -> None:
    """Keys separated by commas; what is not set is as for everybody."""
    settings = load(
        {
            "STRATA_TENANTS__ACME__KEYS": "sk-1, sk-2",
            "STRATA_TENANTS__ACME__BUDGET_TOKENS": "9000",
            "STRATA_TENANTS__ACME__MODE": "observe",
            "STRATA_TENANTS__ACME__UPSTREAM_KEY": "sk-up",
            "STRATA_TENANTS__BETA_2__KEYS": "sk-3",
        }
    )
    assert list(settings.tenants) == ["acme", "beta_2"]
    acme, beta = settings.tenants.values()
    assert [key.get_secret_value() for key in acme.keys] == ["sk-1", "sk-2"]
    assert (acme.budget_tokens, acme.mode, beta.budget_tokens, beta.mode) == (9_000, "observe", None, None)
    assert acme.upstream_key is not None
    assert acme.upstream_key.get_secret_value() == "sk-up"


@pytest.mark.parametrize("keys", ["1", "[1]", '["a","b"]', "true", "{", "null", "a=b"])
def test_keys_are_text_whatever_they_look_like(keys: str) -> None:
    """A key that looks like JSON is still a key."""
    (tenant,) = load({"STRATA_TENANTS__ACME__KEYS": keys}).tenants.values()
    assert ",".join(key.get_secret_value() for key in tenant.keys) == keys


OPEN: dict[str, Any] = {"STRATA_UPSTREAM_KEY": "sk-up", "STRATA_HOST": "0.0.0.0"}


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        pytest.param(OPEN, True, id="anybody could spend the key"),
        pytest.param({**OPEN, "STRATA_HOST": "example.org"}, True, id="a name"),
        pytest.param({**OPEN, "STRATA_HOST": "::"}, True, id="all of IPv6"),
        pytest.param({**OPEN, "STRATA_ALLOW_OPEN": "true"}, False, id="allowed"),
        pytest.param({**OPEN, "STRATA_TENANTS__A__KEYS": "k"}, False, id="tenants"),
        pytest.param({**OPEN, "STRATA_HOST": "127.0.0.2"}, False, id="loopback"),
        pytest.param({**OPEN, "STRATA_HOST": "localhost"}, False, id="localhost"),
        pytest.param({**OPEN, "STRATA_HOST": "::1"}, False, id="loopback of IPv6"),
        pytest.param({"STRATA_HOST": "0.0.0.0"}, False, id="no key"),
    ],
)
def test_an_open_door_is_refused(given: dict[str, str], refused: bool) -> None:
    """A key of the proxy's on a public address needs tenants, or a word that it is meant."""
    if refused:
        said = refusal(given)
        assert said.startswith("STRATA_HOST is ")
        assert "STRATA_ALLOW_OPEN" in said
        assert "sk-up" not in said
    else:
        assert load(given).host == given.get("STRATA_HOST")


def test_without_a_mapping_the_environment_is_read() -> None:
    """The one place that does."""
    assert "PATH" in environment()
    assert load().model_dump() == values(environment())
    assert effective(load()) == effective(load(environment()), environment())


def test_prices_and_windows_are_read() -> None:
    """From JSON, by model; money is Decimal."""
    given = {
        "STRATA_PRICES": '{"mine": {"input": 1.25, "cached_read": 0.125, "output": 10}, "free": {"input": 0}}',
        "STRATA_WINDOWS": '{"mine": 32768}',
    }
    settings = load(given)
    assert settings.prices["mine"].input == Decimal("1.25")
    assert settings.prices["free"].cached_read is None
    assert settings.windows == {"mine": 32_768}
    shown = {line.name: line.value for line in effective(settings, given)}
    assert shown["STRATA_WINDOWS"] == '{"mine":32768}'
    assert '"cached_read":"0.125"' in shown["STRATA_PRICES"]


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("PRICES", "x", "STRATA_PRICES: a JSON object"),
        ("PRICES", "[]", "STRATA_PRICES: a JSON object"),
        ("PRICES", '{"m": {}}', "STRATA_PRICES.m.input: field required"),
        ("PRICES", '{"m": {"input": -1}}', "STRATA_PRICES.m.input: input should be greater than or equal to 0, got -1"),
        ("PRICES", '{"m": {"input": 1, "cached": 2}}', "STRATA_PRICES.m.cached: extra inputs are not permitted, got 2"),
        ("WINDOWS", '{"m": 0}', "STRATA_WINDOWS.m: input should be greater than 0, got 0"),
        ("WINDOWS", '{"m": "many"}', "STRATA_WINDOWS.m: "),
    ],
)
def test_prices_and_windows_that_cannot_be(variable: str, value: str, says: str) -> None:
    """The message names the model, the field, the value and what is allowed."""
    with pytest.raises(SettingsError) as refused:
        load({f"STRATA_{variable}": value})
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    "line",
    [
        'STRATA_TENANTS__ACME__KEYS="sk-1', "STRATA_TENANTS__ACME__KEYS sk-1", "STRATA_TENANTS__ACME__KEYS: sk-1",
        "STRATA_TENANTS__ACME__KEYS", "TENANTS__ACME__KEYS=sk-1", "STRATA_ENV_FILE=other.env", "PATH=/bin",
        "STRATA_TENANTS__ACME__KEYS=", "STRATA_TENANTS__ACME__MODELS=",
    ],
)  # fmt: skip
def test_a_line_of_a_file_that_says_nothing_is_refused(line: str, tmp_path: Path) -> None:
    """A tenant that is left out without a word would leave the door open."""
    file = tmp_path / "strata.env"
    file.write_text(f"# clients\nSTRATA_MODE=observe\n{line}\n")
    said = refusal({"STRATA_ENV_FILE": str(file)})
    assert "line 3" in said or "is empty" in said


def test_a_file_is_read_behind_the_environment(tmp_path: Path) -> None:
    """As written: quotes may hold blanks, and a dollar sign is a dollar sign."""
    file = tmp_path / "strata.env"
    file.write_text("\n# a comment\nexport STRATA_MODE=observe\nSTRATA_TENANTS__ACME__KEYS='a$B, c'\nSTRATA_PORT=1\n")
    found = load({"STRATA_ENV_FILE": str(file), "STRATA_PORT": "2"})
    assert (found.mode, found.port) == ("observe", 2)
    assert [key.get_secret_value() for key in found.tenants["acme"].keys] == ["a$B", "c"]
    told = {line.name: line.source for line in effective(found, {"STRATA_ENV_FILE": str(file), "STRATA_PORT": "2"})}
    assert (told["STRATA_MODE"], told["STRATA_PORT"], told["STRATA_HOST"]) == (str(file), "environment", "default")


@pytest.mark.parametrize("name", ["KEYS", "MODELS"])
def test_an_empty_list_of_a_tenant_is_refused(name: str) -> None:
    """A variable that was to hold it was not set: the opposite of what is meant would be in force."""
    given = {"STRATA_TENANTS__ACME__KEYS": "k", f"STRATA_TENANTS__ACME__{name}": ""}
    assert f"STRATA_TENANTS__ACME__{name} is empty" in refusal(given)


def test_a_password_in_a_url_is_not_shown() -> None:
    """Nor is the value of any secret."""
    said = refusal({"STRATA_TENANTS__ACME__KEYS": "k", "STRATA_TENANTS__ACME__UPSTREAM_URL": "http://u:hunter2@h/v1"})
    assert "STRATA_TENANTS__ACME__UPSTREAM_URL" in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("url", "given", "takes"),
    [
        ("https://api.openai.com/v1", None, True),
        ("https://mine.openai.azure.com/openai/v1", None, False),
        ("https://api.openai.com.evil.example/v1", None, False),
        ("http://127.0.0.1:8080", None, False),
        ("http://127.0.0.1:8080", "true", True),
        ("https://api.openai.com/v1", "false", False),
    ],
)
def test_a_last_system_message_goes_only_where_it_is_known_to_be_taken(
    url: str, given: str | None, takes: bool
) -> None:
    """Azure serves models of others under the same address, and some of them refuse one."""
    more = {} if given is None else {"STRATA_SYSTEM_LAST": given}
    assert load({"STRATA_UPSTREAM_URL": url, **more}).takes_system_last(url) is takes
