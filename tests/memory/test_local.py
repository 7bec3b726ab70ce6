"""Memory of this process alone: bounded, and forgetful in time."""

from collections.abc import Callable
from typing import Any

import pytest

from proxy.core.epoch import Epoch
from proxy.core.lineage import Frozen, Recalled
from proxy.memory.local import LocalStore
from proxy.memory.store import Entry, Tally, View

Make = Callable[..., Entry]
Begin = Callable[..., Epoch]


@pytest.fixture
def local(clock: Any) -> LocalStore:
    return LocalStore(max_bytes=10_000, ttl_seconds=60, clock=clock)


async def places(local: LocalStore, conversation: str) -> list[bytes]:
    return [place for _, place in (await local.recall(conversation)).recalled.log]


async def test_a_conversation_is_forgotten_after_its_time(
    local: LocalStore, clock: Any, entry: Make, epoch: Begin
) -> None:
    """The time slides with each use."""
    await local.remember("c", [entry("k")], epoch("k"))
    clock.now += 59
    assert await places(local, "c") == [b"k"]
    clock.now += 59
    assert await places(local, "c") == [b"k"]
    clock.now += 61
    assert await places(local, "c") == []
    assert (await local.recall("c")).recalled.epochs == {}


async def test_the_least_recently_used_goes_first(local: LocalStore, entry: Make) -> None:
    """Beyond the bound whole conversations go, and never the one in use."""
    for name in "abc":
        await local.remember(name, [entry("k", name + "x" * 2_000)], None)
    assert await places(local, "a") == [b"k"]
    await local.remember("d", [entry("k", "d" + "x" * 3_000)], None)
    assert [bool(await places(local, name)) for name in "abcd"] == [True, False, True, True]


async def test_one_conversation_larger_than_all_is_not_kept(local: LocalStore, entry: Make) -> None:
    """The bound is a bound."""
    await local.remember("c", [entry("k", "x" * 20_000)], None)
    assert await places(local, "c") == []
    await local.remember("d", [entry("k", "x" * 2_000)], None)
    assert await places(local, "d") == [b"k"]


async def test_the_same_content_counts_once(local: LocalStore, entry: Make) -> None:
    """A message forwarded in every epoch takes its room once."""
    for number in range(8):
        await local.remember("c", [entry("k", "x" * 2_000, epoch=f"{number}")], None)
    assert len(await places(local, "c")) == 8


@pytest.mark.parametrize("kind", ["answered", "seen", "conversations", "leading", "libraries", "epochs", "places"])
async def test_everything_kept_counts(kind: str, clock: Any, entry: Make, epoch: Begin) -> None:
    """Answers, views, epochs and empty conversations cannot grow beyond the bound either."""
    local = LocalStore(max_bytes=20_000, ttl_seconds=60, clock=clock)
    await local.remember("first", [entry("k")], None)
    for number in range(2_000):
        match kind:
            case "answered":
                await local.remember("c", [entry("k")], None)
                await local.answered("c", entry("k"), [b"%016d" % number])
            case "seen":
                await local.seen(f"c{number}", View(at=1, turns=1, layers=[["L1", 1, "x"]], library=[]), Tally())
            case "conversations":
                await local.answered(f"c{number}", entry("k"), [b"1"])
            case "leading":
                await local.remember("c", [], epoch(f"{number}", leading=(b"x" * 100,)))
            case "libraries":
                await local.remember("c", [], epoch(f"{number}", f"{number}", leading=()))
            case "epochs":
                await local.remember("c", [], epoch(f"{number}", leading=()))
            case _:
                await local.remember("c", [entry(f"{number}")], None)
    assert await places(local, "first") == []


async def test_what_nobody_asks_for_goes_in_time(local: LocalStore, clock: Any, entry: Make) -> None:
    """Another conversation's request is enough: nothing is kept because nothing has come for it."""
    await local.remember("old", [entry("k")], None)
    await local.remember("long", [entry("k")], None, ttl_seconds=10_000)
    clock.now += 1_000
    await local.remember("new", [entry("k")], None)
    assert {*local._conversations} == {"long", "new"}
    assert local._size == sum(held.size for held in local._conversations.values())


async def test_orders_of_tools_are_bounded_in_all(local: LocalStore) -> None:
    """However many owners come, and however many tools: the latest stand."""
    for owner in range(1_000):
        await local.order(f"{owner}", tuple(f"{owner} {tool}".encode() for tool in range(500)))
    assert await local.orders("0", ()) == ()
    assert len(await local.orders("999", ())) == 1
    assert sum(len(order) for orders in local._orders.values() for order in orders) <= 100_000
    assert await local.order("0", tuple(f"{tool}".encode() for tool in range(5_000))) is None
    assert await local.orders("0", ()) == ()


async def test_attempts_at_one_turn_are_bounded(local: LocalStore, entry: Make) -> None:
    """Not even a client that tries for ever fills the memory; the latest stand, which it goes on from."""
    for number in range(40):
        await local.remember("c", [entry("k", f"{number}")], None)
    kept = (await local.recall("c")).recalled.log[b"e", b"k"]
    assert [frozen.raw for frozen in kept] == [entry("k", f"{number}").frozen.raw for number in range(24, 40)]


async def test_another_stores_word_is_added(local: LocalStore, clock: Any, entry: Make, epoch: Begin) -> None:
    """Messages, answers and epochs of both; of one epoch the shared store's; the view stays."""
    other = LocalStore(max_bytes=10_000, ttl_seconds=60, clock=clock)
    await other.remember("c", [entry("k", "a", b"2", started=7.0), entry("new", started=7.0)], epoch("new", "b"))
    await other.remember("c", [], epoch("both", "b"))
    await local.remember("c", [entry("k", "a", b"1", started=5.0), entry("old", started=5.0)], epoch("old", "a"))
    await local.remember("c", [], epoch("both", "a"))
    await local.seen("c", View(at=1, turns=1, layers=[], library=[]), Tally())
    merged = local.merge("c", other.copy("c"), gone_at=0.0)
    assert merged == local.copy("c")
    assert merged.seen_at == 7.0
    assert dict(merged.epochs) == {b"new": epoch("new", "b"), b"old": epoch("old", "a"), b"both": epoch("both", "b")}
    assert {place: tries for (_, place), tries in merged.log.items()} == {
        b"k": (Frozen(started=5.0, raw=entry("k", "a").frozen.raw, replies=frozenset({b"1", b"2"})),),
        b"old": (Frozen(started=5.0, raw=entry("old").frozen.raw),),
        b"new": (Frozen(started=7.0, raw=entry("new").frozen.raw),),
    }
    assert await local.view("c") is not None


async def test_what_is_older_than_a_deletion_is_not_kept(local: LocalStore, entry: Make, epoch: Begin) -> None:
    """Another replica deleted the conversation; what came after is kept, and nothing of before."""
    await local.remember("c", [entry("old", started=5.0)], epoch("old", "a", started=5.0))
    await local.remember("c", [entry("new", started=7.0)], epoch("new", "b", started=7.0))
    merged = local.merge("c", Recalled(), gone_at=6.0)
    assert ([place for _, place in merged.log if merged.log[b"e", place]], list(merged.epochs)) == ([b"new"], [b"new"])
    assert local.copy("c") == merged


async def test_nothing_merged_with_nothing_is_nothing(local: LocalStore) -> None:
    """Of a conversation nobody knows, no trace is kept."""
    assert local.merge("c", Recalled(), gone_at=0.0) == Recalled()
    assert local.merge("c", Recalled(), gone_at=1.0) == Recalled()
    assert await local.forget("c") is False


async def test_what_was_recalled_does_not_change(local: LocalStore, entry: Make, epoch: Begin) -> None:
    """A plan under way reads the value it was given, whatever is written meanwhile."""
    await local.remember("c", [entry("k")], epoch("k"))
    recalled = (await local.recall("c")).recalled
    await local.remember("c", [entry("k", "other"), entry("l")], epoch("l"))
    await local.answered("c", entry("k"), [b"1"])
    assert list(recalled.epochs) == [b"k"]
    assert {where: [one.replies for one in tries] for where, tries in recalled.log.items()} == {
        (b"e", b"k"): [frozenset()]
    }


async def test_closing_forgets_all(local: LocalStore, entry: Make) -> None:
    """And what is remembered afterwards has its full room."""
    await local.remember("c", [entry("k")], None)
    await local.close()
    assert await places(local, "c") == []
    assert local.degraded is False
