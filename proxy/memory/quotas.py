"""Where quotas are counted: in this process, or in Redis, where one script reserves and one settles."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from proxy.core import quota
from proxy.core.quota import KINDS, LEASE_SECONDS, NEW, Account, Ask, Quotas, Verdict
from proxy.memory.redis import RECALL_SECONDS, ROOT, WRITE_SECONDS, RedisStore

_MOST_OWNERS = 10_000
_MOST_OWED = 100_000
_DAY_SECONDS = 3 * 86_400
_MONTH_SECONDS = 40 * 86_400


class Counting(Protocol):
    """Counts what owners use. Times are milliseconds of the wall clock."""

    async def admit(self, owner: str, quotas: Quotas, ask: Ask, now_ms: int) -> Verdict | None:
        """Reserve, or say what forbids it; None where the store does not answer."""
        ...

    async def settle(
        self, owner: str, ask: Ask, *, tokens: int, nanos: int, now_ms: int, reserved: bool = True
    ) -> None:
        """Put what was used in the place of what was reserved; what cannot be told now is told later.

        `reserved` is False where `admit` did not answer.
        """
        ...

    async def renew(self, asks: Mapping[str, Sequence[Ask]], now_ms: int) -> None:
        """Keep reservations, by owner, of requests that are still under way."""
        ...


class LocalCounting(Counting):
    """This process's own accounts."""

    def __init__(self) -> None:
        self._accounts: collections.OrderedDict[str, Account] = collections.OrderedDict()

    @override
    async def admit(self, owner: str, quotas: Quotas, ask: Ask, now_ms: int) -> Verdict:
        account, verdict = quota.admit(self._accounts.get(owner, NEW), quotas, ask, now_ms)
        self._put(owner, account)
        return verdict

    @override
    async def settle(
        self, owner: str, ask: Ask, *, tokens: int, nanos: int, now_ms: int, reserved: bool = True
    ) -> None:
        account = self._accounts.get(owner, NEW)
        self._put(owner, quota.settle(account, ask, tokens=tokens, nanos=nanos, now_ms=now_ms))

    @override
    async def renew(self, asks: Mapping[str, Sequence[Ask]], now_ms: int) -> None:
        for owner, held in asks.items():
            account = self._accounts.get(owner, NEW)
            self._put(owner, quota.renew(account, frozenset(ask.id for ask in held), now_ms))

    def _put(self, owner: str, account: Account) -> None:
        self._accounts[owner] = account
        self._accounts.move_to_end(owner)
        while len(self._accounts) > _MOST_OWNERS:
            self._accounts.popitem(last=False)


_SHARED = """
local now = tonumber(ARGV[1])
-- Adding nothing makes 0 of -0, which is no integer.
local function whole(number) return string.format('%.0f', number + 0) end
local function add(key, field, amount) return tonumber(redis.call('HINCRBY', key, field, whole(amount))) end
local function get(key, field) return tonumber(redis.call('HGET', key, field) or '0') end
local function free(member)
  if redis.call('ZREM', KEYS[1], member) == 1 then
    local tokens, nanos = string.match(member, '|(%d+)|(%d+)$')
    add(KEYS[2], 'tokens', -tonumber(tokens))
    add(KEYS[2], 'nanos', -tonumber(nanos))
    return true
  end
  return false
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. ARGV[1])) do free(member) end
"""
"""KEYS: reservations by end of lease, what is reserved and the two buckets, the day, the month. ARGV[1]: now."""

_ADMIT = (
    _SHARED
    + """
local tokens, nanos = tonumber(ARGV[3]), tonumber(ARGV[4])
local limits = {}
for i = 1, 7 do limits[i] = tonumber(ARGV[6 + i]) end
local function bucket(name, limit)
  if not limit then return nil, now end
  local full = limit * 60000
  local grains, at = tonumber(redis.call('HGET', KEYS[2], name)), get(KEYS[2], name .. '_at')
  if not grains then return full, now end
  if now > at then grains = grains + (now - at) * limit end
  if grains > full then grains = full end
  return grains, math.max(now, at)
end
local requests, requests_at = bucket('requests_left', limits[1])
local rate, rate_at = bucket('tokens_left', limits[2])
local live = redis.call('ZCARD', KEYS[1])
local held_tokens, held_nanos = get(KEYS[2], 'tokens'), get(KEYS[2], 'nanos')
local day_tokens, day_nanos = get(KEYS[3], 'tokens') + held_tokens, get(KEYS[3], 'nanos') + held_nanos
local month_tokens, month_nanos = get(KEYS[4], 'tokens') + held_tokens, get(KEYS[4], 'nanos') + held_nanos
local over = 0
if requests and requests < 60000 then over = over + 1 end
if rate and rate < tokens * 60000 then over = over + 2 end
if limits[3] and live + 1 > limits[3] then over = over + 4 end
if limits[4] and day_tokens + tokens > limits[4] then over = over + 8 end
if limits[5] and month_tokens + tokens > limits[5] then over = over + 16 end
if limits[6] and day_nanos + nanos > limits[6] then over = over + 32 end
if limits[7] and month_nanos + nanos > limits[7] then over = over + 64 end
if over == 0 then
  if requests then requests = requests - 60000 end
  if rate then rate = rate - tokens * 60000 end
end
if over == 0 or ARGV[6] == '1' then
  add(KEYS[2], 'tokens', tokens)
  add(KEYS[2], 'nanos', nanos)
  redis.call('ZADD', KEYS[1], ARGV[5], ARGV[2] .. '|' .. ARGV[3] .. '|' .. ARGV[4])
  live = live + 1
  day_tokens, day_nanos = day_tokens + tokens, day_nanos + nanos
  month_tokens, month_nanos = month_tokens + tokens, month_nanos + nanos
end
local function keep(name, grains, at)
  if grains then redis.call('HSET', KEYS[2], name, whole(grains), name .. '_at', whole(at)) end
end
keep('requests_left', requests, requests_at)
keep('tokens_left', rate, rate_at)
redis.call('EXPIRE', KEYS[1], 86400)
redis.call('EXPIRE', KEYS[2], 86400)
return {over, whole(requests or 0), whole(rate or 0), live, whole(day_tokens), whole(day_nanos),
  whole(month_tokens), whole(month_nanos)}
"""
)
"""ARGV: now, id, tokens, nanos, end of lease, whether it goes all the same, seven limits (empty: none)."""

_SETTLE = (
    _SHARED
    + """
local held = free(ARGV[2] .. '|' .. ARGV[3] .. '|' .. ARGV[4])
local time = redis.call('TIME')
local late = tonumber(time[1]) * 1000 - now
-- Tried before, and it may have been done: then the reservation is gone, long before its lease ends.
if not held and ARGV[7] == '1' and late < 60000 then return 0 end
if held and redis.call('HEXISTS', KEYS[2], 'tokens_left') == 1 then
  add(KEYS[2], 'tokens_left', (tonumber(ARGV[3]) - tonumber(ARGV[5])) * 60000)
end
for i, seconds in ipairs({ARGV[8], ARGV[9]}) do
  add(KEYS[2 + i], 'tokens', tonumber(ARGV[5]))
  add(KEYS[2 + i], 'nanos', tonumber(ARGV[6]))
  redis.call('EXPIRE', KEYS[2 + i], seconds)
end
return 1
"""
)
"""ARGV: now, id, tokens and nanos reserved, tokens and nanos used, whether in doubt, days' and months' lives."""


@dataclass(slots=True)
class _Owed:
    keys: list[str]
    ask: Ask
    tokens: int
    nanos: int
    now_ms: int
    reserved: bool
    tried: bool = False


class RedisCounting(Counting):
    """Exact across replicas: each call is one script. What could not be settled is kept and told when Redis is back."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._admit = store.script(_ADMIT)
        self._settle = store.script(_SETTLE)
        self._owed: collections.deque[_Owed] = collections.deque(maxlen=_MOST_OWED)
        self._paying = False

    @override
    async def admit(self, owner: str, quotas: Quotas, ask: Ask, now_ms: int) -> Verdict | None:
        limits = [quotas.limits.get(kind, "") for kind in KINDS]
        until = now_ms + int(LEASE_SECONDS * 1000)
        arguments = [now_ms, ask.id, ask.tokens, ask.nanos, until, int(quotas.shadow), *limits]
        found = await self._store.run("quota", self._admit, _keys(owner, now_ms), arguments, seconds=RECALL_SECONDS)
        if found is None:
            return None
        bits, requests, tokens, live, *periods = (int(each) for each in found)
        over = tuple(kind for place, kind in enumerate(KINDS) if bits >> place & 1)
        left = (requests, tokens)
        used = quota.usage(
            quotas.limits, left=left, live=live, day=(periods[0], periods[1]), month=(periods[2], periods[3])
        )
        return Verdict(over=over, used=used, wait_seconds=quota.wait(over, quotas.limits, left, ask))

    @override
    async def settle(
        self, owner: str, ask: Ask, *, tokens: int, nanos: int, now_ms: int, reserved: bool = True
    ) -> None:
        self._owed.append(_Owed(_keys(owner, now_ms), ask, tokens, nanos, now_ms, reserved))
        await self._pay()

    async def _pay(self) -> None:
        """Settle what is owed, in order; whoever comes while this goes on leaves it to whoever began."""
        if self._paying:
            return
        self._paying = True
        try:
            while self._owed and await self._paid(self._owed[0]):
                self._owed.popleft()
        finally:
            self._paying = False

    async def _paid(self, owed: _Owed) -> bool:
        if self._store.degraded:
            return False
        ask, doubt = owed.ask, int(owed.tried and owed.reserved)
        owed.tried = True
        arguments = [
            owed.now_ms, ask.id, ask.tokens, ask.nanos, owed.tokens, owed.nanos, doubt,
            _DAY_SECONDS, _MONTH_SECONDS,
        ]  # fmt: skip
        return await self._store.run("quota", self._settle, owed.keys, arguments, seconds=WRITE_SECONDS) is not None

    @override
    async def renew(self, asks: Mapping[str, Sequence[Ask]], now_ms: int) -> None:
        await self._pay()
        until = now_ms + int(LEASE_SECONDS * 1000)
        leases = {
            _keys(owner, now_ms)[0]: {f"{ask.id}|{ask.tokens}|{ask.nanos}": until for ask in held}
            for owner, held in asks.items()
            if held
        }
        if leases:
            await self._store.extend("quota", leases)


def _keys(owner: str, now_ms: int) -> list[str]:
    day, month = quota.periods(now_ms)
    base = f"{ROOT}:quota:{{{owner}}}"
    return [f"{base}:live", f"{base}:held", f"{base}:{day}", f"{base}:{month}"]
