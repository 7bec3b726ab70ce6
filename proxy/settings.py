"""Every setting, from the environment, read in one place and nowhere else. Prefix `STRATA_`."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Literal
from urllib.parse import SplitResult, urlsplit

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from typing_extensions import override

PREFIX = "STRATA_"
_NESTED = "TENANTS__"
_KUBERNETES = re.compile(r"STRATA(_\w+)?_(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)")
"""What Kubernetes puts into every pod beside a Service named strata; no setting of ours."""


def _list(value: object) -> object:
    """`a, b` → `("a", "b")`."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


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
    parts = urlsplit(url)
    if parts.scheme not in schemes or not (parts.hostname or parts.scheme == "unix"):
        raise ValueError(f"a URL that begins with {begins}")
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"a URL whose port is a number up to 65535 ({error})") from error
    return parts


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
Mode = Literal["layered", "observe"]
Tokens = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


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


class TenantSettings(BaseModel):
    """One tenant, `STRATA_TENANTS__ACME__KEYS` and its like; what is not set is as for everybody."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: Secrets = Field(description="Bearer keys of this tenant, separated by commas.")
    budget_tokens: Tokens | None = Field(None, description="The most tokens one request of this tenant may hold.")
    mode: Mode | None = Field(None, description="`layered` or `observe`, for this tenant.")
    upstream_key: SecretStr | None = Field(None, description="This tenant's own key at the upstream.")

    @field_validator("keys")
    @classmethod
    def _some(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not keys:
            raise ValueError("at least one key")
        return tuple(key for each in keys if (key := _key(each)) is not None)

    @field_validator("upstream_key")
    @classmethod
    def _own(cls, key: SecretStr | None) -> SecretStr | None:
        return _key(key)


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
        "info", description="`info` writes one JSON line a request."
    )
    mode: Mode = Field(
        "layered", description="`observe` forwards the client's bytes as they are and records what they did."
    )
    promotion: Literal["deferred", "eager"] = Field(
        "deferred",
        description="When items enter L2: at an epoch's end, or (`eager`) on the turn after they were attached.",
    )
    current_values: bool = Field(
        default=True,
        description="Take lines of the system prompt that change within a conversation out of its stable part.",
    )
    anonymous_library: bool = Field(
        default=True,
        description="Put items that anonymous clients send again and again into L2, from their own requests.",
    )
    windowed: bool = Field(
        default=False,
        description="Complete named conversations whose client sends only its last messages, from what it sent before.",
    )
    system_last: bool | None = Field(
        None,
        description="The upstream takes a system message at the very end, there and not at the head; "
        "by default only OpenAI and Azure are believed to.",
    )
    cached_read_price: Annotated[float, Field(ge=0, le=1)] = Field(
        0.10, description="What the upstream takes for a cached prompt token, as a share of an uncached one."
    )
    cached_write_price: Annotated[float, Field(ge=0, le=4)] = Field(
        1.0, description="What it takes for a token it writes to its prompt cache, as a share of an uncached one."
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
        None, description="The most tokens one request may hold; by default the model's window."
    )
    output_reserve_tokens: Tokens = Field(4_096, description="Kept free for the answer where the request names none.")
    over_budget: Literal["forward", "reject"] = Field(
        "forward", description="What happens to a request that cannot be made to fit the budget."
    )
    conversation_headers: Names = Field(
        ("x-session-id", "x-openwebui-chat-id"),
        description="Headers that name a conversation, besides `x-strata-conversation`.",
    )
    user_headers: Names = Field(
        ("x-openwebui-user-id",), description="Headers that name an end user; they keep conversations apart."
    )
    remember_content: bool = Field(
        default=True, description="Keep items of named conversations; `false` keeps digests only."
    )
    conversation_ttl_seconds: Annotated[int, Field(gt=0)] = Field(
        86_400, description="A named conversation is forgotten this long after its last request."
    )
    memory_bytes: Annotated[int, Field(ge=1_000_000)] = Field(
        64_000_000, description="Bound of this process's own memory."
    )
    secret: SecretStr | None = Field(
        None, description="Key of the digests that partition memory; by default made once and kept in Redis."
    )
    allow_open: bool = Field(
        default=False, description="Allow a public address with an upstream key and no tenants: anybody may spend it."
    )
    context_tags: Names = Field((), description="More tags whose blocks are context items.")
    max_body_bytes: Annotated[int, Field(ge=1_024)] = Field(
        33_554_432, description="Largest request body of the chat path, decoded."
    )
    connect_timeout_seconds: Seconds = Field(10.0, description="To connect to the upstream.")
    first_byte_timeout_seconds: Seconds = Field(600.0, description="From the request to the head of the answer.")
    idle_timeout_seconds: Seconds = Field(300.0, description="Between two pieces of an answer; the whole has no limit.")
    shutdown_seconds: Annotated[int, Field(ge=0)] = Field(
        30, description="How long live streams may go on after SIGTERM."
    )
    admin_token: SecretStr | None = Field(None, description="Bearer token that `/metrics` then asks for.")
    tenants: dict[str, TenantSettings] = Field(
        default_factory=dict, description="Per tenant: `STRATA_TENANTS__<NAME>__KEYS`, `…__BUDGET_TOKENS` and so on."
    )

    @field_validator("upstream_url")
    @classmethod
    def _base(cls, url: str) -> str:
        parts = _split(url, "http", "https")
        if parts.username is not None:
            raise ValueError("a URL without a user; a key goes into STRATA_UPSTREAM_KEY")
        if parts.query or parts.fragment:
            raise ValueError("a URL without a query; clients' own queries are passed on")
        if parts.path.rstrip("/").endswith("/chat/completions"):
            raise ValueError("the base of an API, without /chat/completions")
        return url

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
            _split(url.get_secret_value(), "redis", "rediss", "unix")
        return url

    @field_validator("upstream_key", "admin_token")
    @classmethod
    def _token(cls, key: SecretStr | None) -> SecretStr | None:
        return _key(key)

    @field_validator("conversation_headers", "user_headers")
    @classmethod
    def _lower(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.lower() for name in names)

    @field_validator("context_tags")
    @classmethod
    def _tags(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
                raise ValueError(f"tag names (letters, digits, _ . -); {name!r} is none")
        return names

    @property
    def takes_system_last(self) -> bool:
        """Whether current values may stand in a system message at the very end."""
        host = urlsplit(self.upstream_url).hostname or ""
        known = host == "api.openai.com" or host.endswith(".openai.azure.com")
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


class SettingsError(Exception):
    """A setting that cannot be; the message names the variable, the value and what is allowed."""


def environment() -> dict[str, str]:
    """Return the process's environment."""
    return dict(os.environ)  # noqa: TID251 -- the one reader


def export(options: Mapping[str, str]) -> None:
    """Let worker processes, which read the environment anew, find what the command line said."""
    os.environ.update(options)  # noqa: TID251 -- the one owner


def load(given_by: Mapping[str, str] | None = None) -> Settings:
    """Read and check all settings. Raises SettingsError with one line for each that is wrong."""
    given = _ours(environment() if given_by is None else given_by)
    unknown = [_unknown(name) for name in given if not _known(name)]
    if unknown:
        raise SettingsError("\n".join(unknown))
    try:
        settings = _read(given)
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(dict(problem), given) for problem in error.errors())) from error
    _check(settings)
    return settings


@dataclass(frozen=True, slots=True)
class Effective:
    """One line of `strata config`."""

    name: str
    value: str
    source: str


def effective(settings: Settings, given_by: Mapping[str, str] | None = None) -> tuple[Effective, ...]:
    """List every setting in force, where it comes from, secrets masked."""
    given = _ours(environment() if given_by is None else given_by)
    lines = [
        Effective(PREFIX + name.upper(), _shown(getattr(settings, name)),
                  "environment" if PREFIX + name.upper() in given else "default")
        for name in Settings.model_fields if name != "tenants"
    ]  # fmt: skip
    for tenant, fields in settings.tenants.items():
        for name in TenantSettings.model_fields:
            variable = f"{PREFIX}{_NESTED}{tenant.upper()}__{name.upper()}"
            if variable in given:
                lines.append(Effective(variable, _shown(getattr(fields, name)), "environment"))
    return tuple(lines)


def _read(given: Mapping[str, str]) -> Settings:
    """Let pydantic-settings read exactly these variables."""

    class _Given(Settings):
        @classmethod
        @override
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: PydanticBaseSettingsSource, **named: PydanticBaseSettingsSource
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            source = EnvSettingsSource(settings_cls)
            source.env_vars = {name.lower(): value for name, value in given.items()}
            return (source,)

    return _Given()


def _ours(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name.upper(): value
        for name, value in environment.items()
        if value
        and name.upper().startswith(PREFIX)
        and not _KUBERNETES.fullmatch(name.upper())
        and not (name.upper().endswith("_PORT") and value.startswith(("tcp://", "udp://")))
    }


def _variables() -> list[str]:
    return [PREFIX + name.upper() for name in Settings.model_fields if name != "tenants"]


def _known(name: str) -> bool:
    if name.startswith(PREFIX + _NESTED):
        tenant, _, field = name.removeprefix(PREFIX + _NESTED).partition("__")
        return bool(tenant) and field.lower() in TenantSettings.model_fields
    return name in _variables()


def _unknown(name: str) -> str:
    if name.startswith(PREFIX + _NESTED):
        fields = ", ".join(f"{PREFIX}{_NESTED}<NAME>__{field.upper()}" for field in TenantSettings.model_fields)
        return f"{name}: no such setting; a tenant has {fields}"
    near = difflib.get_close_matches(name, _variables(), n=1)
    return f"{name}: no such setting" + (f"; did you mean {near[0]}?" if near else "")


def _explain(problem: dict[str, object], given: Mapping[str, str]) -> str:
    where = problem["loc"]
    assert isinstance(where, tuple)
    path = [str(part).upper() for part in where if not isinstance(part, int)]
    if where[0] in {"prices", "windows"}:
        inside = "".join(f".{part}" for part in where[1:])
        message = str(problem["msg"]).removeprefix("Value error, ")
        return f"{PREFIX}{path[0]}{inside}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"
    variable = PREFIX + "__".join(path[:3])
    secret = path[-1].endswith(("KEY", "KEYS", "SECRET", "TOKEN", "REDIS_URL", "PROXY"))
    value = "" if secret or variable not in given else f" is {given[variable]!r}"
    allowed = str(problem["msg"]).removeprefix("Value error, ")
    return f"{variable}{value}: {allowed[0].lower()}{allowed[1:]}"


def _shown(value: object) -> str:
    match value:
        case None:
            return ""
        case SecretStr():
            return "********"
        case tuple():
            return ",".join(_shown(part) for part in value)
        case bool():
            return str(value).lower()
        case dict():
            plain = {name: each.model_dump(exclude_none=True) if isinstance(each, BaseModel) else each
                     for name, each in value.items()}  # fmt: skip
            return orjson.dumps(plain, default=str).decode() if plain else ""
        case _:
            return str(value)


def _check(settings: Settings) -> None:
    """Refuse what is dangerous or contradicts itself."""
    budgets = {f"{PREFIX}BUDGET_TOKENS": settings.budget_tokens}
    budgets |= {f"{PREFIX}{_NESTED}{name.upper()}__BUDGET_TOKENS": tenant.budget_tokens
                for name, tenant in settings.tenants.items()}  # fmt: skip
    for variable, budget in budgets.items():
        if budget is not None and budget <= settings.output_reserve_tokens:
            raise SettingsError(
                f"{variable} is {budget}: more than {PREFIX}OUTPUT_RESERVE_TOKENS ({settings.output_reserve_tokens}), "
                "which is kept free for the answer"
            )
    owners: dict[str, str] = {}
    for name, tenant in settings.tenants.items():
        for key in tenant.keys:
            other = owners.setdefault(key.get_secret_value(), name)
            if other != name:
                raise SettingsError(f"{PREFIX}{_NESTED}{name.upper()}__KEYS: a key is also tenant {other.upper()}'s")
    if settings.upstream_key and not settings.tenants and not settings.loopback and not settings.allow_open:
        raise SettingsError(
            f"{PREFIX}HOST is {settings.host!r}: with {PREFIX}UPSTREAM_KEY and no tenants anybody who can connect "
            f"would spend that key; configure {PREFIX}TENANTS__<NAME>__KEYS, listen on 127.0.0.1, or set "
            f"{PREFIX}ALLOW_OPEN=true"
        )


def default_text(field: FieldInfo) -> str:
    """Return a field's default as the README shows it."""
    value = field.get_default(call_default_factory=True)
    return f"`{_shown(value)}`" if value not in (None, (), {}) else "none"
