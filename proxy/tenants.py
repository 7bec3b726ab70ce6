"""Who a request belongs to: resolved from its key. Everything stored is partitioned by the answer."""

from __future__ import annotations

import collections
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass

from proxy.core.epoch import Profile
from proxy.core.plan import Policy
from proxy.errors import UNKNOWN_KEY, StrataError
from proxy.settings import Settings
from proxy.upstream.headers import CREDENTIALS

DEFAULT = "default"
_ALSO_CREDENTIAL = ("openai-organization", "openai-project")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """`name` labels metrics; `owner` is what memory is partitioned by: a tenant's name or a client's whole credential.

    `upstream_key` goes upstream in the client's place; with `hides_credentials` the client's never does;
    `shares_key` when other tenants use the same key at the upstream.
    """

    name: str
    owner: str | Mapping[str, str]
    policy: Policy
    upstream_key: str | None
    hides_credentials: bool
    shares_key: bool


class Tenants:
    """All that are configured, or the one `default` whose clients bring their own keys."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._policy = Policy(
            mode=settings.mode,
            promotion=settings.promotion,
            profile=_profile(settings),
            budget_tokens=settings.budget_tokens,
            reserve_tokens=settings.output_reserve_tokens,
            over_budget=settings.over_budget,
            anonymous_library=settings.anonymous_library,
            windowed=settings.windowed,
        )
        self._shared = settings.upstream_key.get_secret_value() if settings.upstream_key else None
        self._by_key: dict[bytes, Tenant] = {}
        upstream = {
            name: tenant.upstream_key.get_secret_value() if tenant.upstream_key else self._shared
            for name, tenant in settings.tenants.items()
        }
        holders = collections.Counter(upstream.values())
        for name, tenant in settings.tenants.items():
            resolved = Tenant(
                name=name,
                owner=name,
                policy=Policy(
                    mode=tenant.mode or settings.mode,
                    promotion=settings.promotion,
                    profile=_profile(settings),
                    budget_tokens=tenant.budget_tokens or settings.budget_tokens,
                    reserve_tokens=settings.output_reserve_tokens,
                    over_budget=settings.over_budget,
                    anonymous_library=settings.anonymous_library,
                    windowed=settings.windowed,
                ),
                upstream_key=upstream[name],
                hides_credentials=True,
                shares_key=holders[upstream[name]] > 1,
            )
            for key in tenant.keys:
                self._by_key[_digest(key.get_secret_value())] = resolved

    @property
    def names(self) -> tuple[str, ...]:
        """The configured names."""
        return tuple(self._settings.tenants)

    @property
    def nobody(self) -> Tenant:
        """Whose a request is before its key has been looked at."""
        return Tenant(
            name=DEFAULT, owner={}, policy=self._policy, upstream_key=None, hides_credentials=True, shares_key=True
        )

    def resolve(self, headers: Mapping[str, str], query: str = "") -> Tenant:
        """Return a request's tenant. Raises StrataError (401) when tenants are configured and the key is nobody's."""
        if self._by_key:
            found = self._by_key.get(_digest(_bearer(headers)))
            if found is None:
                raise StrataError(UNKNOWN_KEY, "Incorrect API key provided. It belongs to no tenant of this proxy.")
            return found
        credential = {name: headers[name] for name in _CREDENTIAL_NAMES if name in headers}
        if keys := _QUERY_KEY.findall(query):
            credential["query"] = "&".join(keys)
        if not credential.keys() - {"cookie", *_ALSO_CREDENTIAL}:
            credential |= {"cookie": headers["cookie"]} if "cookie" in headers else {}
        return Tenant(
            name=DEFAULT,
            owner=credential,
            policy=self._policy,
            upstream_key=self._shared,
            hides_credentials=self._shared is not None,
            shares_key=False,
        )


def _profile(settings: Settings) -> Profile:
    return Profile(
        read=settings.cached_read_price,
        write=settings.cached_write_price,
        lifetime_seconds=settings.prompt_cache_lifetime_seconds,
        minimum_tokens=settings.prompt_cache_minimum_tokens,
        block_tokens=settings.prompt_cache_block_tokens,
        system_last=settings.takes_system_last,
    )


# A cookie says who somebody is only where no key does: load balancers set a new one with every answer.
_CREDENTIAL_NAMES = (*sorted(name.decode() for name in CREDENTIALS - {b"cookie"}), *_ALSO_CREDENTIAL)
_QUERY_KEY = re.compile(r"(?:^|&)((?:key|api[-_]?key)=[^&]*)", re.IGNORECASE)
_PROCESS = b"strata"


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("api-key") or headers.get("x-api-key") or headers.get("x-goog-api-key") or ""


def _digest(key: str) -> bytes:
    """Look keys up by digest: how long a comparison takes then says nothing of the key."""
    return hmac.digest(_PROCESS, key.encode("utf-8", "surrogatepass"), "sha256")
