"""Where quotas are counted: in this process, or in Redis, where one script reserves and one settles."""

from __future__ import annotations

import collections
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from proxy.core import quota
from proxy.core.quota import KINDS, LEASE_SECONDS, NEW, Account, Ask, Quotas, Verdict
from proxy.memory.redis import RECALL_SECONDS, ROOT, WRITE_SECONDS, RedisStore

_MOST_OWNERS = 10_000
_MOST_OWED = 100_000
_LEASE_MS = int(LEASE_SECONDS * 1000)


class Counting(Protocol):
    """Counts what owners use. `now_ms`, of the wall clock, is for a store that has no clock of its own."""

    async def admit(self, owner: str, quotas: Quotas, ask: Ask, now_ms: int) -> Verdict | None:
        """Reserve, or say what forbids it; None where the store does not answer."""
        ...

    async def settle(self, owner: str, ask: Ask, *, tokens: int, nanos: int, now_ms: int) -> None:
        """Put what was used in the place of what was reserved; what cannot be told now is told later."""
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
    async def settle(self, owner: str, ask: Ask, *, tokens: int, nanos: int, now_ms: int) -> None:
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


_NOW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
"""
"""Redis's clock: those of replicas differ."""

_SHARED = """
local lease = tonumber(ARGV[1])
-- Adding nothing makes 0 of -0, which is no integer.
local function whole(number) return string.format('%.0f', number + 0) end
local function add(key, field, amount) return tonumber(redis.call('HINCRBY', key, field, whole(amount))) end
local function get(key, field) return tonumber(redis.call('HGET', key, field) or '0') end
local function reserve(member, sign)
  local tokens, nanos = string.match(member, '|(%d+)|(%d+)$')
  add(KEYS[2], 'tokens', sign * tonumber(tokens))
  add(KEYS[2], 'nanos', sign * tonumber(nanos))
end
local function free(member)
  local held = redis.call('ZREM', KEYS[1], member) == 1
  if held then reserve(member, -1) end
  return held
end
-- The calendar of UTC: a day's name.
local function date(at)
  local days = math.floor(at / 86400000) + 719468
  local era = math.floor(days / 146097)
  local day = days - era * 146097
  local year = math.floor((day - math.floor(day / 1460) + math.floor(day / 36524) - math.floor(day / 146096)) / 365)
  day = day - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local month = math.floor((5 * day + 2) / 153)
  day = day - math.floor((153 * month + 2) / 5) + 1
  month = month < 10 and month + 3 or month - 9
  return string.format('%04d-%02d-%02d', year + era * 400 + (month < 3 and 1 or 0), month, day)
end
-- A Redis that is full lets go of one of the two and not of the other.
if redis.call('ZCARD', KEYS[1]) == 0 then
  redis.call('HDEL', KEYS[2], 'tokens', 'nanos')
elseif redis.call('HEXISTS', KEYS[2], 'tokens') == 0 then
  for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do reserve(member, 1) end
  redis.call('EXPIRE', KEYS[2], 86400)
end
-- A clock that went back has left leases that would never end.
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. whole(now + lease), '+inf')) do
  redis.call('ZADD', KEYS[1], whole(now + lease), member)
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. whole(now))) do free(member) end
"""
"""KEYS: reservations by end of lease, what is reserved and the two buckets, what was used by period.

The last alone has no time to live: a Redis that is full lets go of what has one. ARGV[1]: how long a lease is.
"""

_ADMIT = """
local tokens, nanos = tonumber(ARGV[3]), tonumber(ARGV[4])
local limits = {}
for i = 1, 7 do limits[i] = tonumber(ARGV[5 + i]) end
local function bucket(name, limit)
  if not limit then return nil end
  local full = limit * 60000
  local grains = tonumber(redis.call('HGET', KEYS[2], name)) or full
  return math.min(full, grains + math.max(0, now - get(KEYS[2], name .. '_at')) * limit)
end
local requests, rate = bucket('requests_left', limits[1]), bucket('tokens_left', limits[2])
local live = redis.call('ZCARD', KEYS[1])
local held_tokens, held_nanos = get(KEYS[2], 'tokens'), get(KEYS[2], 'nanos')
local day, month = date(now), string.sub(date(now), 1, 7)
local day_tokens, day_nanos = get(KEYS[3], day .. ':tokens') + held_tokens, get(KEYS[3], day .. ':nanos') + held_nanos
local month_tokens = get(KEYS[3], month .. ':tokens') + held_tokens
local month_nanos = get(KEYS[3], month .. ':nanos') + held_nanos
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
if over == 0 or ARGV[5] == '1' then
  local member = ARGV[2] .. '|' .. ARGV[3] .. '|' .. ARGV[4]
  reserve(member, 1)
  redis.call('ZADD', KEYS[1], whole(now + lease), member)
  live = live + 1
  day_tokens, day_nanos = day_tokens + tokens, day_nanos + nanos
  month_tokens, month_nanos = month_tokens + tokens, month_nanos + nanos
end
local function keep(name, grains)
  if grains then redis.call('HSET', KEYS[2], name, whole(grains), name .. '_at', whole(now)) end
end
keep('requests_left', requests)
keep('tokens_left', rate)
redis.call('EXPIRE', KEYS[1], 86400)
redis.call('EXPIRE', KEYS[2], 86400)
return {over, whole(requests or 0), whole(rate or 0), live, whole(day_tokens), whole(day_nanos),
  whole(month_tokens), whole(month_nanos)}
"""
"""ARGV: a lease, id, tokens, nanos, whether it goes all the same, seven limits (empty: none)."""

_SETTLE = """
-- A call whose answer did not come may have been made.
if redis.call('GET', KEYS[4]) == ARGV[2] then return 0 end
local day = date(now - tonumber(ARGV[7]))
local oldest = date(now - 3 * 86400000)
for _, period in ipairs({day, string.sub(day, 1, 7)}) do
  for i, name in ipairs({'tokens', 'nanos'}) do
    local amount = tonumber(ARGV[4 + i])
    if amount ~= 0 and add(KEYS[3], period .. ':' .. name, amount) == amount then
      for _, field in ipairs(redis.call('HKEYS', KEYS[3])) do
        local past = string.match(field, '^[^:]*')
        if past < string.sub(oldest, 1, #past) then redis.call('HDEL', KEYS[3], field) end
      end
    end
  end
end
local held = free(ARGV[2] .. '|' .. ARGV[3] .. '|' .. ARGV[4])
if held and redis.call('HEXISTS', KEYS[2], 'tokens_left') == 1 then
  add(KEYS[2], 'tokens_left', (tonumber(ARGV[3]) - tonumber(ARGV[5])) * 60000)
end
redis.call('SET', KEYS[4], ARGV[2], 'EX', 3600)
return 1
"""
"""KEYS[4]: what the process has settled last. ARGV: a lease, id, tokens and nanos reserved, tokens and nanos used,
how many milliseconds ago. A period's first count is when old periods go.
"""

_RENEW = """
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', string.format('%.0f', now + tonumber(ARGV[1])), ARGV[i]) end
"""


@dataclass(frozen=True, slots=True)
class _Owed:
    ask: Ask
    tokens: int
    nanos: int
    since: float


class RedisCounting(Counting):
    """Exact across replicas: each call is one script. What could not be settled is kept and told when Redis is back."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._admit = store.script(_NOW + _SHARED + _ADMIT)
        self._settle = store.script(_NOW + _SHARED + _SETTLE)
        self._name = uuid.uuid4().hex
        self._owed: dict[str, collections.deque[_Owed]] = {}
        self._paying = False

    @override
    async def admit(self, owner: str, quotas: Quotas, ask: Ask, now_ms: int) -> Verdict | None:
        limits = [quotas.limits.get(kind, "") for kind in KINDS]
        arguments = [_LEASE_MS, ask.id, ask.tokens, ask.nanos, int(quotas.shadow), *limits]
        found = await self._store.run("quota", self._admit, _keys(owner), arguments, seconds=RECALL_SECONDS)
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
    async def settle(self, owner: str, ask: Ask, *, tokens: int, nanos: int, now_ms: int) -> None:
        self._owed.setdefault(owner, collections.deque()).append(_Owed(ask, tokens, nanos, time.monotonic()))
        if sum(map(len, self._owed.values())) > _MOST_OWED:
            max(self._owed.values(), key=len).popleft()
        await self._pay()

    async def _pay(self) -> None:
        """Settle what is owed, each owner's in order; whoever comes while this goes on leaves it to whoever began.

        An owner whose keys Redis refuses to count in holds up nobody else.
        """
        if self._paying:
            return
        self._paying = True
        refused: set[str] = set()
        try:
            while owner := next((each for each in self._owed if each not in refused), None):
                queue = self._owed[owner]
                if not queue:
                    del self._owed[owner]
                elif await self._paid(owner, owed := queue[0]):
                    if queue and queue[0] is owed:
                        queue.popleft()
                elif self._store.degraded:
                    return
                else:
                    refused.add(owner)
        finally:
            self._paying = False

    async def _paid(self, owner: str, owed: _Owed) -> bool:
        if self._store.degraded:
            return False
        ask, ago = owed.ask, int((time.monotonic() - owed.since) * 1000)
        arguments = [_LEASE_MS, ask.id, ask.tokens, ask.nanos, owed.tokens, owed.nanos, ago]
        keys = [*_keys(owner), f"{_base(owner)}:settled:{self._name}"]
        return await self._store.run("quota", self._settle, keys, arguments, seconds=WRITE_SECONDS) is not None

    @override
    async def renew(self, asks: Mapping[str, Sequence[Ask]], now_ms: int) -> None:
        await self._pay()
        leases = {
            _keys(owner)[0]: [str(_LEASE_MS), *(f"{ask.id}|{ask.tokens}|{ask.nanos}" for ask in held)]
            for owner, held in asks.items()
            if held
        }
        if leases:
            await self._store.each("quota", _NOW + _RENEW, leases)


def _base(owner: str) -> str:
    return f"{ROOT}:quota:{{{owner}}}"


def _keys(owner: str) -> list[str]:
    base = _base(owner)
    return [f"{base}:live", f"{base}:held", f"{base}:used"]
