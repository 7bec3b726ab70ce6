"""Who a request belongs to: resolved from its key. Everything stored is partitioned by the answer."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import fnmatch
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.core.policy import Policy
from proxy.core.profile import USUAL, Profile
from proxy.core.quota import KINDS, Kind, Quotas, nanos
from proxy.environment import digest, held
from proxy.errors import NO_MODEL, UNKNOWN_KEY, StrataError
from proxy.settings import Settings, TenantSettings
from proxy.upstream.headers import is_credential, keys_in
from proxy.upstream.target import base_of, models_asked

DEFAULT = "default"
_ALSO_CREDENTIAL = ("openai-organization", "openai-project")
_INLINE_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """`name` labels metrics; `owner` is what memory is partitioned by: a tenant's name or a client's whole credential.

    `quota_owner` is whose quotas count: all who spend the proxy's own key are one. `upstream_key` goes upstream in the
    client's place; with `hides_credentials` the client's never does; `shares_key` when other tenants use the same key
    at the same upstream. `models` are patterns, none for all.
    """

    name: str
    owner: str | Mapping[str, str]
    quota_owner: str | Mapping[str, str]
    policy: Policy
    quotas: Quotas
    models: tuple[str, ...]
    upstream_url: str
    upstream_key: str | None
    hides_credentials: bool
    shares_key: bool
    summary_model: str | None
    remember_content: bool
    ttl_seconds: int

    def may_use(self, model: str) -> bool:
        """Whether this tenant may ask for a model."""
        return not self.models or any(fnmatch.fnmatchcase(model.lower(), pattern) for pattern in self.models)


class Tenants:
    """All that are configured, or the one `default` whose clients bring their own keys."""

    def __init__(self, settings: Settings) -> None:
        self.take(settings)

    def take(self, settings: Settings) -> None:
        """Put these settings in the place of those before; requests under way keep the tenant they have."""
        self._everybody = _resolved(DEFAULT, settings, None)
        by_key: dict[str, Tenant] = {}
        resolved = {name: _resolved(name, settings, own) for name, own in settings.tenants.items()}
        holders = collections.Counter((base_of(each.upstream_url), each.upstream_key) for each in resolved.values())
        for name, own in settings.tenants.items():
            tenant = resolved[name]
            tenant = dataclasses.replace(
                tenant, shares_key=holders[base_of(tenant.upstream_url), tenant.upstream_key] > 1
            )
            for key in own.keys:
                by_key[held(key)] = tenant
        self._by_key = by_key
        self.names = tuple(settings.tenants)
        self.upstreams = tuple(dict.fromkeys(each.upstream_url for each in (self._everybody, *resolved.values())))

    @property
    def any_quotas(self) -> bool:
        """Whether any tenant has a quota."""
        return any(each.quotas for each in (self._everybody, *self._by_key.values()))

    @property
    def nobody(self) -> Tenant:
        """Whose a request is before its key has been looked at."""
        return dataclasses.replace(self._everybody, upstream_key=None, hides_credentials=True, shares_key=True)

    def resolve(self, headers: Mapping[str, str], query: str = "") -> Tenant:
        """Return a request's tenant. Raises StrataError (401) when tenants are configured and the key is nobody's."""
        if self.names:
            found = self._by_key.get(digest(_bearer(headers)))
            if found is None:
                raise StrataError(UNKNOWN_KEY, "Incorrect API key provided. It belongs to no tenant of this proxy.")
            return found
        credential = {name: headers[name] for name in headers if is_credential(name.encode("latin-1"))}
        if keys := keys_in(query.encode("latin-1")):
            credential["query"] = b"&".join(keys).decode("latin-1")
        if not credential.keys().isdisjoint(_KEYS):
            # Beside a key a cookie says nothing: the upstream's own edge sets some.
            credential.pop("cookie", None)
        spender = next(({name: credential[name]} for name in _SPENDING if name in credential), credential)
        credential = credential | {name: headers[name] for name in _ALSO_CREDENTIAL if name in headers}
        who = self._everybody.quota_owner if self._everybody.upstream_key is not None else spender
        return dataclasses.replace(self._everybody, owner=credential, quota_owner=who)


async def allowed(tenant: Tenant, raw_path: bytes, headers: Mapping[str, str], body: bytes) -> None:
    """Hold a request to its tenant's models. Raises StrataError (404)."""
    work = functools.partial(models_asked, raw_path, body, content_type=headers.get("content-type", ""))
    for name in await asyncio.to_thread(work) if len(body) > _INLINE_BYTES else work():
        if not tenant.may_use(name):
            why = f"The model {name[:200]!r} does not exist or this key may not use it."
            raise StrataError(NO_MODEL, why, param="model")


def _resolved(name: str, settings: Settings, own: TenantSettings | None) -> Tenant:
    """Put together what a tenant sets and what is for everybody."""

    def of(field: str) -> Any:
        value = getattr(own, field, None)
        return getattr(settings, field) if value is None else value

    url: str = of("upstream_url")
    # Everybody's key is not for another's server.
    everybodys = settings.upstream_key if base_of(url) == base_of(settings.upstream_url) else None
    key = own.upstream_key if own and own.upstream_key else everybodys
    limits: dict[Kind, int] = {}
    for kind in KINDS:
        if (value := of(kind)) is not None:
            limits[kind] = nanos(value) if kind.startswith("usd") else value
    return Tenant(
        name=name,
        owner=name if own else {},
        quota_owner=name,
        policy=Policy(
            mode=of("mode"),
            promotion=settings.promotion,
            profile=_profile(settings, url),
            budget_tokens=of("budget_tokens"),
            reserve_tokens=of("output_reserve_tokens"),
            over_budget=of("over_budget"),
            current_values=settings.current_values,
            anonymous_library=settings.anonymous_library,
            windowed=of("windowed"),
        ),
        quotas=Quotas(limits=limits, shadow=of("quota_mode") == "shadow"),
        models=tuple(pattern.lower() for pattern in of("models")),
        upstream_url=url,
        upstream_key=key.get_secret_value() if key else None,
        hides_credentials=own is not None or key is not None,
        shares_key=False,
        summary_model=of("summary_model"),
        remember_content=of("remember_content"),
        ttl_seconds=max(1, int(of("conversation_ttl_seconds"))),
    )


def _profile(settings: Settings, upstream_url: str) -> Profile:
    return Profile(
        read=USUAL.read if settings.cached_read_price is None else settings.cached_read_price,
        write=USUAL.write if settings.cached_write_price is None else settings.cached_write_price,
        lifetime_seconds=settings.prompt_cache_lifetime_seconds,
        minimum_tokens=settings.prompt_cache_minimum_tokens,
        block_tokens=settings.prompt_cache_block_tokens,
        system_last=settings.takes_system_last(upstream_url),
    )


# A cookie says who somebody is only where no key does: load balancers set a new one with every answer.
_KEYS = ("authorization", "api-key", "x-api-key", "x-goog-api-key", "query")
_SPENDING = (*_KEYS, "cookie")
"""What an upstream may charge by, the first that is there: what else a client sends makes it nobody else."""


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("api-key") or headers.get("x-api-key") or headers.get("x-goog-api-key") or ""
