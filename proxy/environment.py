"""Reading the settings: from the process's environment and a file, in one place and nowhere else."""

from __future__ import annotations

import difflib
import hashlib
import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
from dotenv.parser import parse_stream
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource
from typing_extensions import override

from proxy.settings import DIGESTED, PREFIX, Settings, TenantSettings

_NESTED = "TENANTS__"
_FILE = PREFIX + "ENV_FILE"
_KUBERNETES = re.compile(r"STRATA(_\w+)?_(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)")
"""What Kubernetes puts into every pod beside a Service named strata; no setting of ours."""


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
    given = _given(given_by)
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
    own = _ours(environment() if given_by is None else given_by)
    given = _given(given_by)

    def source(variable: str) -> str:
        return "environment" if variable in own else settings.env_file or "" if variable in given else "default"

    lines = [
        Effective(PREFIX + name.upper(), _shown(getattr(settings, name)), source(PREFIX + name.upper()))
        for name in Settings.model_fields
        if name != "tenants"
    ]
    for tenant, fields in settings.tenants.items():
        for name in TenantSettings.model_fields:
            variable = f"{PREFIX}{_NESTED}{tenant.upper()}__{name.upper()}"
            if variable in given:
                lines.append(Effective(variable, _shown(getattr(fields, name)), source(variable)))
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
    for name, value in environment.items():
        if not value.strip() and re.fullmatch(PREFIX + _NESTED + r".+__(KEYS|MODELS)", name.upper()):
            # A variable that was not set where this one was made of it: the opposite of what is meant.
            raise SettingsError(f"{name.upper()} is empty; leave it out, or name at least one")
    return {
        name.upper(): value
        for name, value in environment.items()
        if value
        and name.upper().startswith(PREFIX)
        and not _KUBERNETES.fullmatch(name.upper())
        and not (name.upper().endswith("_PORT") and value.startswith(("tcp://", "udp://")))
    }


def _given(given_by: Mapping[str, str] | None) -> dict[str, str]:
    """Return the variables given, those of the file behind those of the environment."""
    own = _ours(environment() if given_by is None else given_by)
    name = own.get(_FILE)
    if name is None:
        return own
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{_FILE} is {name!r}: {error}") from error
    read: dict[str, str] = {}
    # As written: a key may hold a dollar sign.
    for line in parse_stream(io.StringIO(text)):
        if line.error or (line.key is not None and line.value is None):
            raise SettingsError(f"{_FILE} is {name!r}: line {line.original.line} is not NAME=value")
        if line.key is None:
            continue
        if not line.key.upper().startswith(PREFIX) or line.key.upper() == _FILE:
            raise SettingsError(
                f"{_FILE} is {name!r}: line {line.original.line} sets {line.key}, no setting of a file's"
            )
        read[line.key] = line.value or ""
    return {**_ours(read), **own}


def _variables() -> list[str]:
    return [PREFIX + name.upper() for name in Settings.model_fields if name != "tenants"]


def _known(name: str) -> bool:
    if name.startswith(PREFIX + _NESTED):
        tenant, _, field = name.removeprefix(PREFIX + _NESTED).partition("__")
        return bool(tenant) and field.lower() in TenantSettings.model_fields
    return name in _variables()


def _unknown(name: str) -> str:
    if name.startswith(PREFIX + _NESTED):
        tenant, _, field = name.removeprefix(PREFIX + _NESTED).partition("__")
        fields = [each.upper() for each in TenantSettings.model_fields]
        close = difflib.get_close_matches(field, fields, n=1)
        known = f"did you mean {PREFIX}{_NESTED}{tenant}__{close[0]}?" if close else f"a tenant has {', '.join(fields)}"
        return f"{name}: no such setting; {known}"
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
    # A URL may hold a password.
    password = path[-1].endswith("URL") and "@" in given.get(variable, "")
    secret = password or path[-1].endswith(("KEY", "KEYS", "SECRET", "TOKEN", "REDIS_URL", "PROXY"))
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
    _check_budget(settings.budget_tokens, settings.output_reserve_tokens, PREFIX)
    owners: dict[str, str] = {}
    for name, tenant in settings.tenants.items():
        prefix = f"{PREFIX}{_NESTED}{name.upper()}__"
        reserve = tenant.output_reserve_tokens or settings.output_reserve_tokens
        _check_budget(tenant.budget_tokens or settings.budget_tokens, reserve, prefix)
        for key in tenant.keys:
            other = owners.setdefault(held(key), name)
            if other != name:
                raise SettingsError(f"{prefix}KEYS: a key is also tenant {other.upper()}'s")
    if settings.upstream_key and not settings.tenants and not settings.loopback and not settings.allow_open:
        raise SettingsError(
            f"{PREFIX}HOST is {settings.host!r}: with {PREFIX}UPSTREAM_KEY and no tenants anybody who can connect "
            f"would spend that key; configure {PREFIX}TENANTS__<NAME>__KEYS, listen on 127.0.0.1, or set "
            f"{PREFIX}ALLOW_OPEN=true"
        )


def _check_budget(budget: int | None, reserve: int, prefix: str) -> None:
    if budget is not None and budget <= reserve:
        raise SettingsError(
            f"{prefix}BUDGET_TOKENS is {budget}: it must be more than {prefix}OUTPUT_RESERVE_TOKENS ({reserve}), "
            "which is kept free for the answer"
        )


def digest(key: str) -> str:
    """Return the SHA-256 of a key, which settings may give in the key's place."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def held(key: SecretStr) -> str:
    """Return the digest of a key of the settings, which may be one."""
    text = key.get_secret_value()
    return text.removeprefix(DIGESTED).lower() if text.startswith(DIGESTED) else digest(text)


def default_text(field: FieldInfo) -> str:
    """Return a field's default as the README shows it."""
    value = field.get_default(call_default_factory=True)
    return f"`{_shown(value)}`" if value not in (None, (), {}) else "none"
