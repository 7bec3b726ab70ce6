"""Memory of this process alone: bounded, and forgetful in time."""

from collections.abc import Callable
from typing import Any

import pytest

from proxy.core.items import Item
from proxy.memory.local import LocalStore
from proxy.memory.store import Tally, Turn, View

Make = Callable[..., Turn]


@pytest.fixture
def local(clock: Any) -> LocalStore:
    return LocalStore(max_bytes=10_000, ttl_seconds=60, clock=clock)


async def keys(local: LocalStore, conversation: str) -> list[bytes]:
    return list((await local.recall(conversation)).recalled.turns)


async def test_a_conversation_is_forgotten_after_its_time(local: LocalStore, clock: Any, turn: Make) -> None:
    """The time slides with each use."""
    await local.remember("c", turn("k", "a"))
    clock.now += 59
    assert await keys(local, "c") == [b"k"]
    clock.now += 59
    assert await keys(local, "c") == [b"k"]
    clock.now += 61
    assert await keys(local, "c") == []


async def test_the_least_recently_used_goes_first(local: LocalStore, item: Callable[..., Item]) -> None:
    """Beyond the bound whole conversations go, and never the one in use."""
    for name in "abc":
        await local.remember(name, Turn(key=b"k", started=1, items=(item(name, "x" * 2_000),)))
    assert await keys(local, "a") == [b"k"]
    await local.remember("d", Turn(key=b"k", started=1, items=(item("d", "x" * 3_000),)))
    assert [bool(await keys(local, name)) for name in "abcd"] == [True, False, True, True]


async def test_one_conversation_larger_than_all_is_not_kept(local: LocalStore, item: Callable[..., Item]) -> None:
    """The bound is a bound."""
    await local.remember("c", Turn(key=b"k", started=1, items=(item("a", "x" * 20_000),)))
    assert await keys(local, "c") == []
    await local.remember("d", Turn(key=b"k", started=1, items=(item("a", "x" * 2_000),)))
    assert await keys(local, "d") == [b"k"]


async def test_the_same_content_counts_once(local: LocalStore, item: Callable[..., Item]) -> None:
    """A note attached in every turn takes its room once."""
    for turn in range(8):
        await local.remember("c", Turn(key=b"%d" % turn, started=1, items=(item("a", "x" * 2_000),)))
    assert len(await keys(local, "c")) == 8


@pytest.mark.parametrize("kind", ["answered", "seen", "conversations"])
async def test_everything_kept_counts(kind: str, clock: Any, turn: Make) -> None:
    """Answers, views and empty conversations cannot grow beyond the bound either."""
    local = LocalStore(max_bytes=20_000, ttl_seconds=60, clock=clock)
    await local.remember("first", turn("k", "a"))
    for number in range(2_000):
        if kind == "answered":
            await local.remember("c", turn("k", "a"))
            await local.answered("c", turn("k", "a"), [b"%016d" % number])
        elif kind == "seen":
            await local.seen(f"c{number}", View(at=1, turns=1, layers=[["L1", 1, "x"]], library=[]), Tally())
        else:
            await local.answered(f"c{number}", turn("k", "a"), [b"1"])
    assert await keys(local, "first") == []


async def test_attempts_at_one_turn_are_bounded(local: LocalStore, turn: Make) -> None:
    """Not even a client that tries for ever fills the memory."""
    for number in range(40):
        await local.remember("c", turn("k", f"{number}"))
    assert len((await local.recall("c")).recalled.turns[b"k"]) == 16


async def test_another_stores_word_replaces_what_was_known(local: LocalStore, clock: Any, turn: Make) -> None:
    """It takes the place of turns, and leaves the view."""
    other = LocalStore(max_bytes=10_000, ttl_seconds=60, clock=clock)
    await other.remember("c", turn("new", "b"))
    await local.remember("c", turn("old", "a"))
    await local.seen("c", View(at=1, turns=1, layers=[], library=[]), Tally())
    local.replace("c", other.copy("c"))
    assert local.copy("c") == other.copy("c")
    assert await local.view("c") is not None


async def test_closing_forgets_all(local: LocalStore, turn: Make) -> None:
    """And what is remembered afterwards has its full room."""
    await local.remember("c", turn("k", "a"))
    await local.close()
    assert await keys(local, "c") == []
    assert local.degraded is False
