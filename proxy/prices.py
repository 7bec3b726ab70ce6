"""Which price a model has at the upstream: what the settings say, else the `genai-prices` package, else unknown.

The package's list is large and takes a tenth of a second to load: it is loaded in a thread, at start, and only where
the upstream's address is one of a provider's.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

from proxy.core.models import LONGEST_NAME
from proxy.core.price import Price, Rates

_HOUR = 3_600.0
"""Some prices change with the hour."""
_MOST_MODELS = 1_000

Find = Callable[[str, datetime], Any]


class Prices:
    """Prices at each upstream. `given` are those of the settings, by model."""

    def __init__(self, given: Mapping[str, Rates]) -> None:
        self.take(given)
        self._find: dict[str, Find] = {}
        self._known: dict[tuple[str, str], tuple[float, Price | None]] = {}

    def take(self, given: Mapping[str, Rates]) -> None:
        """Put these prices in the place of those given before."""
        self._given = {name.lower(): Price(((0, rates),)) for name, rates in given.items()}

    def load(self, upstreams: Iterable[str]) -> None:
        """Load the list for upstreams at a provider's address; takes a while."""
        for url in upstreams:
            if url not in self._find and not own(url):
                self._find[url] = _listed(url)
        self._known = {}

    def of(self, model: str, upstream: str, now: float) -> Price | None:
        """Return a model's price at an upstream, or None: unknown, and nothing is made up."""
        if len(model) > LONGEST_NAME:
            return None
        name = model.lower()
        given = self._given.get(name) or self._given.get(name.rpartition("/")[2])
        if given is not None:
            return given
        at, price = self._known.get((upstream, name), (0.0, None))
        if now > at + _HOUR:
            if len(self._known) >= _MOST_MODELS:
                self._known.clear()
            price = self._look(name, upstream, now)
            self._known[upstream, name] = (now, price)
        return price

    def _look(self, name: str, upstream: str, now: float) -> Price | None:
        find = self._find.get(upstream)
        if find is None or not name:
            return None
        try:
            return _price(find(name, datetime.fromtimestamp(now, UTC)))
        except (LookupError, ValueError, OverflowError, OSError):
            return None


def own(url: str) -> bool:
    """Whether an upstream is at an address of one's own: no provider's price holds there."""
    host = urlsplit(url).hostname or ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith((".local", ".internal", ".svc", ".lan"))
    return True


def _listed(url: str) -> Find:
    from genai_prices import data_snapshot  # noqa: PLC0415 -- large, and not needed everywhere

    snapshot = data_snapshot.get_snapshot()

    def find(name: str, now: datetime) -> Any:
        _, model = snapshot.find_provider_model(name, None, None, url)
        return model.get_prices(now)

    return find


def _price(listed: Any) -> Price | None:
    """Read one of the package's prices; None where it states none for plain input."""
    fields = (listed.input_mtok, listed.cache_read_mtok, listed.cache_write_mtok, listed.output_mtok)
    starts = sorted({0, *(tier.start for field in fields for tier in getattr(field, "tiers", ()))})
    tiers = []
    for start in starts:
        plain, read, write, output = (_at(field, start) for field in fields)
        if plain is None:
            return None
        rates = Rates(
            input=plain,
            cached_read=plain if read is None else read,
            cached_write=plain if write is None else write,
            output=Decimal(0) if output is None else output,
        )
        tiers.append((start, rates))
    return Price(tuple(tiers))


def _at(field: Any, start: int) -> Decimal | None:
    if field is None or isinstance(field, Decimal):
        return field
    rates = [field.base, *(tier.price for tier in field.tiers if tier.start <= start)]
    last: Decimal = rates[-1]
    return last
