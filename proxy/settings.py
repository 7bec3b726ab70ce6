"""Every setting: its name, type, default and what it is. `environment` reads them. Prefix `STRATA_`."""

from __future__ import annotations

import ipaddress
import re
from decimal import Decimal
from typing import Annotated, Literal
from urllib.parse import SplitResult, parse_qs, urlsplit

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from proxy.core.policy import Mode, OverBudget, Promotion

PREFIX = "STRATA_"
DIGESTED = "sha256:"


def _list(value: object) -> object:
    """`a, b` → `("a", "b")`."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _some(value: object) -> object:
    """A list that is left out for all must name something: of blanks and commas it would be the opposite."""
    names = _list(value)
    if isinstance(value, str) and not names:
        raise ValueError("at least one name; leave it out for all")
    return names


def _headers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names by which HTTP could carry a header, in small letters."""
    for name in names:
        if not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII):
            raise ValueError(f"header names (letters, digits, - and the like); {name!r} is none")
    return tuple(name.lower() for name in names)


def _switch(value: object, read: ValidatorFunctionWrapHandler) -> bool:
    try:
        return bool(read(value))
    except ValidationError:
        raise ValueError("true or false") from None


def _key(key: SecretStr | None) -> SecretStr | None:
    """A key goes into a header: no blanks around it, and nothing in it that a header cannot carry."""
    if key is None:
        return None
    text = key.get_secret_value().strip()
    if not text or not all("!" <= char <= "~" for char in text):
        raise ValueError("visible ASCII characters without blanks (is it still an example's placeholder?)")
    return SecretStr(text)


def _split(url: str, *schemes: str) -> SplitResult:
    """Take a URL apart. Raises ValueError that says what it must look like."""
    begins = " or ".join(f"{scheme}://" for scheme in schemes)
    if not all(char.isprintable() and not char.isspace() for char in url):
        raise ValueError("a URL without blanks")
    parts = urlsplit(url)
    if parts.scheme not in schemes or not (parts.hostname or parts.scheme == "unix"):
        raise ValueError(f"a URL that begins with {begins}")
    try:
        _ = parts.port
    except ValueError:
        # Its words could be a password's.
        raise ValueError("a URL whose port is a number up to 65535") from None
    return parts


def _api(url: str) -> str:
    """Check an upstream's base."""
    parts = _split(url, "http", "https")
    if parts.username is not None:
        raise ValueError("a URL without a user; a key goes into …UPSTREAM_KEY")
    if parts.query or parts.fragment:
        raise ValueError("a URL without a query; clients' own queries are passed on")
    if parts.path.rstrip("/").endswith("/chat/completions"):
        raise ValueError("the base of an API, without /chat/completions")
    return url


_REDIS = {
    "db": r"\d+",
    "username": ".+",
    "password": ".+",
    "client_name": ".+",
    "max_connections": r"[1-9]\d*",
    "health_check_interval": r"\d+",
    "socket_timeout": r"\d+(\.\d+)?",
    "socket_connect_timeout": r"\d+(\.\d+)?",
}
_REDIS_TLS = {
    "ssl_ca_certs": ".+",
    "ssl_ca_path": ".+",
    "ssl_certfile": ".+",
    "ssl_keyfile": ".+",
    "ssl_password": ".+",
    "ssl_cert_reqs": "none|optional|required",
    "ssl_check_hostname": "(?i:true|false)",
    "ssl_min_version": "77[12]",
    "ssl_ciphers": ".+",
}
"""What the query of a Redis URL may hold: a connection takes nothing else, and would say so only when it is made."""


def _redis_url(url: str) -> str:
    """Check the address of a Redis. Its query may hold a password, and is not repeated."""
    parts = _split(url, "redis", "rediss", "unix")
    options = _REDIS | (_REDIS_TLS if parts.scheme == "rediss" else {})
    for name, values in parse_qs(parts.query, keep_blank_values=True).items():
        if not all(re.fullmatch(options.get(name, "(?!)"), value) for value in values):
            raise ValueError(
                f"a URL whose query holds no more than {', '.join(options)}, each with a value it can have"
            )
    return url


def _object(value: object) -> object:
    """`{"a": 1}` as JSON → a dict."""
    if not isinstance(value, str):
        return value
    try:
        read = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"a JSON object ({error})") from error
    if not isinstance(read, dict):
        raise ValueError("a JSON object")  # noqa: TRY004 -- pydantic tells ValueErrors
    return read


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_list)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_list)]
Models = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_some)]
HeaderNames = Annotated[Names, AfterValidator(_headers)]
Switch = Annotated[bool, WrapValidator(_switch)]
Tokens = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


Dollars = Annotated[Decimal, Field(ge=0)]


class PriceSettings(BaseModel):
    """US dollars a million tokens: `{"input": 1.25, "cached_read": 0.125, "output": 10}`. Cached ones are as `input`.

    `cached_write` is paid in the place of `input`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: Dollars
    cached_read: Dollars | None = None
    cached_write: Dollars | None = None
    output: Dollars = Decimal(0)


Priced = Annotated[dict[str, PriceSettings], NoDecode, BeforeValidator(_object)]
Windows = Annotated[dict[str, Tokens], NoDecode, BeforeValidator(_object)]


Per = Annotated[int, Field(gt=0)]
Money = Annotated[Decimal, Field(gt=0)]
RequestsPerMinute = Annotated[Per | None, Field(description="Quota: requests a minute.")]
TokensPerMinute = Annotated[Per | None, Field(description="Quota: tokens a minute, prompt and answer.")]
ConcurrentRequests = Annotated[Per | None, Field(description="Quota: requests under way at one moment.")]
TokensPerDay = Annotated[Per | None, Field(description="Quota: tokens a day (UTC).")]
TokensPerMonth = Annotated[Per | None, Field(description="Quota: tokens a calendar month (UTC).")]
UsdPerDay = Annotated[Money | None, Field(description="Quota: US dollars a day (UTC), at the upstream's prices.")]
UsdPerMonth = Annotated[Money | None, Field(description="Quota: US dollars a calendar month (UTC).")]
_SUMMARIES = (
    "A model that summarises, beside the requests, what a budget will take from long named conversations. "
    "By default none."
)
QuotaMode = Literal["enforce", "shadow"]
_SHADOW = "`enforce` refuses what is over a quota; `shadow` only reports it."
_MODELS = "Models that may be asked for, separated by commas; `gpt-5*` for all that begin so. By default all."


class TenantSettings(BaseModel):
    """One tenant, `STRATA_TENANTS__ACME__KEYS` and its like; what is not set is as for everybody."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: Secrets = Field(
        description="Bearer keys of this tenant, separated by commas; `sha256:<hex>` for a key's digest in its place."
    )
    models: Models | None = Field(None, description=_MODELS)
    upstream_url: str | None = Field(
        None, description="This tenant's own upstream. The key of everybody's does not go there."
    )
    upstream_key: SecretStr | None = Field(None, description="This tenant's own key at the upstream.")
    mode: Mode | None = Field(None, description="`layered` or `observe`, for this tenant.")
    budget_tokens: Tokens | None = Field(
        None, description="The most tokens one request of this tenant may hold, prompt and answer."
    )
    output_reserve_tokens: Tokens | None = Field(
        None, description="Kept free for the answer where the request names none."
    )
    over_budget: OverBudget | None = Field(
        None, description="`forward` or `reject`, for what cannot be made to fit the budget."
    )
    summary_model: str | None = Field(None, description=_SUMMARIES)
    windowed: Switch | None = Field(None, description="Whether its clients send only their last messages.")
    remember_content: Switch | None = Field(None, description="Whether content of its named conversations is kept.")
    conversation_ttl_seconds: Seconds | None = Field(
        None, description="How long its named conversations are kept after their last request."
    )
    requests_per_minute: RequestsPerMinute = None
    tokens_per_minute: TokensPerMinute = None
    concurrent_requests: ConcurrentRequests = None
    tokens_per_day: TokensPerDay = None
    tokens_per_month: TokensPerMonth = None
    usd_per_day: UsdPerDay = None
    usd_per_month: UsdPerMonth = None
    quota_mode: QuotaMode | None = Field(None, description=_SHADOW)

    @field_validator("keys")
    @classmethod
    def _some(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not keys:
            raise ValueError("at least one key")
        checked = tuple(key for each in keys if (key := _key(each)) is not None)
        for key in checked:
            text = key.get_secret_value()
            if text.startswith(DIGESTED) and not re.fullmatch(r"[0-9a-fA-F]{64}", text.removeprefix(DIGESTED)):
                raise ValueError("a key that begins with sha256: must be a digest, 64 hexadecimal digits behind it")
        return checked

    @field_validator("upstream_key")
    @classmethod
    def _own(cls, key: SecretStr | None) -> SecretStr | None:
        return _key(key)

    @field_validator("upstream_url")
    @classmethod
    def _base(cls, url: str | None) -> str | None:
        return url if url is None else _api(url)


class Settings(BaseSettings):
    """The fields are the configuration table of the README; a test holds the two together."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, env_ignore_empty=True
    )

    upstream_url: str = Field(
        "https://api.openai.com/v1", description="The model API behind the proxy; with `/v1`, `/v1/` or neither."
    )
    upstream_key: SecretStr | None = Field(
        None, description="A key the proxy holds; the client's own credentials then stay here."
    )
    upstream_proxy: SecretStr | None = Field(
        None, description="A forward proxy (`http://host:port`) to reach the upstream through; slower."
    )
    redis_url: SecretStr | None = Field(
        None, description="`redis://…` or `rediss://…`; without it memory is this process's own."
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8080, ge=0, le=65_535, description="Port to listen on; 0 takes a free one.")
    workers: int = Field(1, ge=1, le=256, description="Processes. Share memory through Redis when more than one.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="`debug`, `info`, `warning` or `error`; `info` writes one JSON line a request."
    )
    mode: Mode = Field(
        "layered",
        description="`layered` or `observe`, which forwards the client's bytes as they are and records what they did.",
    )
    promotion: Promotion = Field(
        "deferred",
        description="When items enter L2: at an epoch's end, or (`eager`) on the turn after they were attached.",
    )
    current_values: Switch = Field(
        default=True,
        description="Take lines of the system prompt that change within a conversation out of its stable part.",
    )
    anonymous_library: Switch = Field(
        default=True,
        description="Put back what anonymous clients take out and send again; in new conversations, into L2.",
    )
    windowed: Switch = Field(
        default=False,
        description="Complete named conversations whose client sends only its last messages, from what it sent before.",
    )
    system_last: Switch | None = Field(
        None,
        description="The upstream takes a system message at the very end, there and not at the head; "
        "by default only OpenAI is believed to (Azure serves models of others under the same address).",
    )
    cached_read_price: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="What the upstream takes for a cached prompt token, as a share of an uncached one; "
        "by default the model's price says it, else 0.1.",
    )
    cached_write_price: Annotated[float, Field(ge=0, le=4)] | None = Field(
        None,
        description="What it takes for a token it writes to its prompt cache, as a share of an uncached one; "
        "by default the model's price says it, else 1.",
    )
    prompt_cache_lifetime_seconds: Seconds = Field(
        3600.0, description="After this long without a request the upstream's prompt cache has certainly gone cold."
    )
    prompt_cache_minimum_tokens: Annotated[int, Field(ge=0)] = Field(
        1_024, description="Below so many tokens the upstream's prompt cache holds nothing."
    )
    prompt_cache_block_tokens: Tokens = Field(128, description="It holds prefixes in multiples of so many tokens.")
    prices: Priced = Field(
        default_factory=dict,
        description="US dollars a million tokens by model, "
        '`{"my-model": {"input": 1, "cached_read": 0.1, "output": 4}}`; '
        "others are those of the `genai-prices` package.",
    )
    windows: Windows = Field(
        default_factory=dict,
        description='Context windows by model, `{"my-model": 32768}`, where they are unknown or other than the usual.',
    )
    budget_tokens: Tokens | None = Field(
        None,
        description="The most tokens one request may hold, prompt and answer; must exceed the reserve. "
        "By default the model's window.",
    )
    output_reserve_tokens: Tokens = Field(4_096, description="Kept free for the answer where the request names none.")
    over_budget: OverBudget = Field(
        "forward", description="`forward` or `reject`, for a request that cannot be made to fit the budget."
    )
    models: Models = Field((), description=_MODELS)
    requests_per_minute: RequestsPerMinute = None
    tokens_per_minute: TokensPerMinute = None
    concurrent_requests: ConcurrentRequests = None
    tokens_per_day: TokensPerDay = None
    tokens_per_month: TokensPerMonth = None
    usd_per_day: UsdPerDay = None
    usd_per_month: UsdPerMonth = None
    quota_mode: QuotaMode = Field("enforce", description=_SHADOW)
    quota_without_redis: Literal["open", "closed"] = Field(
        "open",
        description="While Redis does not answer: `open` lets requests through and counts them later, "
        "`closed` refuses them.",
    )
    summary_model: str | None = Field(None, description=_SUMMARIES)
    conversation_headers: HeaderNames = Field(
        ("x-session-id", "x-openwebui-chat-id"),
        description="Headers that name a conversation, besides `x-strata-conversation`.",
    )
    user_headers: HeaderNames = Field(
        ("x-openwebui-user-id",), description="Headers that name an end user; they keep conversations apart."
    )
    remember_content: Switch = Field(
        default=True, description="Keep items of named conversations; `false` keeps digests only."
    )
    conversation_ttl_seconds: Annotated[int, Field(gt=0)] = Field(
        86_400, description="A named conversation is forgotten this long after its last request."
    )
    memory_bytes: Annotated[int, Field(ge=1_000_000)] = Field(
        128_000_000, description="Bound of what a process remembers, about."
    )
    secret: SecretStr | None = Field(
        None, description="Key of the digests that partition memory; by default made once and kept in Redis."
    )
    allow_open: Switch = Field(
        default=False, description="Allow a public address with an upstream key and no tenants: anybody may spend it."
    )
    context_tags: Names = Field((), description="More tags whose blocks are context items.")
    max_body_bytes: Annotated[int, Field(ge=1_024)] = Field(
        33_554_432, description="Largest request body of the chat path, decoded."
    )
    connect_timeout_seconds: Seconds = Field(10.0, description="To connect to the upstream.")
    first_byte_timeout_seconds: Seconds = Field(600.0, description="From the request to the head of the answer.")
    idle_timeout_seconds: Seconds = Field(
        300.0,
        description="Between two pieces of an answer, and how long a client may take none; the whole has no limit.",
    )
    shutdown_seconds: Annotated[int, Field(ge=0)] = Field(
        30, description="How long live streams may go on after SIGTERM."
    )
    admin_token: SecretStr | None = Field(
        None, description="Bearer token that `/metrics` and the live page then ask for."
    )
    debug: Switch = Field(
        default=False,
        description="Show short redacted excerpts of what broke the prompt cache, to whoever made the request.",
    )
    env_file: str | None = Field(
        None, description="A file of more settings, `NAME=value` a line; the environment overrides it. "
        "SIGHUP reads it again."
    )  # fmt: skip
    tenants: dict[str, TenantSettings] = Field(
        default_factory=dict, description="Per tenant: `STRATA_TENANTS__<NAME>__KEYS`, `…__BUDGET_TOKENS` and so on."
    )

    @field_validator("upstream_url")
    @classmethod
    def _base(cls, url: str) -> str:
        return _api(url)

    @field_validator("upstream_proxy")
    @classmethod
    def _egress(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            _split(url.get_secret_value(), "http", "https")
        return url

    @field_validator("redis_url")
    @classmethod
    def _redis(cls, url: SecretStr | None) -> SecretStr | None:
        if url is not None:
            _redis_url(url.get_secret_value())
        return url

    @field_validator("upstream_key", "admin_token")
    @classmethod
    def _token(cls, key: SecretStr | None) -> SecretStr | None:
        return _key(key)

    @field_validator("tenants", mode="before")
    @classmethod
    def _named(cls, tenants: object) -> object:
        for name in tenants if isinstance(tenants, dict) else ():
            if not all(char.isprintable() and not char.isspace() for char in name):
                raise ValueError(f"names without blanks; STRATA_TENANTS__{name.upper()}__… has {name!r}")
        return tenants

    @field_validator("context_tags")
    @classmethod
    def _tags(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
                raise ValueError(f"tag names (letters, digits, _ . -); {name!r} is none")
        return names

    def takes_system_last(self, upstream_url: str) -> bool:
        """Whether an upstream takes current values in a system message at the very end."""
        known = urlsplit(upstream_url).hostname == "api.openai.com"
        return known if self.system_last is None else self.system_last

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
