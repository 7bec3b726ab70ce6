"""What every store does, in this process or in Redis."""

import dataclasses
from collections.abc import Callable

import pytest

from proxy.core.chain import Place
from proxy.core.epoch import Epoch
from proxy.core.items import Item
from proxy.core.lineage import Frozen, Link, Recalled
from proxy.memory.local import MOST_SETS
from proxy.memory.store import Entry, Keys, Store, Tally, View

Make = Callable[..., Entry]
Begin = Callable[..., Epoch]


def frozen(entry: Entry, *replies: bytes) -> Frozen:
    return dataclasses.replace(entry.frozen, replies=frozenset(replies))


def by_start(recalled: Recalled) -> dict[tuple[Place, Place], list[Frozen]]:
    return {where: sorted(tries, key=lambda tried: tried.started) for where, tries in recalled.log.items()}


def view(at: float = 5.0, turns: int = 2) -> View:
    return View(at=at, turns=turns, layers=[["L1", 10, "ab"]], library=[["a.md", "note_context", "cd"]])


async def test_nothing_is_known_of_an_unknown_conversation(store: Store) -> None:
    """Recall, view and forget say so, and nothing is degraded."""
    answer = await store.recall("c")
    assert (answer.recalled, answer.degraded, store.degraded) == (Recalled(), False, False)
    assert await store.view("c") is None
    assert await store.forget("c") is False


@pytest.mark.parametrize("raw", [b"{}", b'{"a" : "\\u00e9 1.0"}', "{é 😀}".encode(), b"\xff\x00\r\n"])
async def test_what_is_remembered_is_recalled(raw: bytes, store: Store) -> None:
    """Byte for byte, with when it was and the answers known."""
    told = Frozen(started=1_764_450_503.123456, raw=raw, replies=frozenset({b"1", b"\xfe"}))
    one = Entry(b"", b"\x00:\xff", told)
    await store.remember("c", [one], None)
    answer = await store.recall("c")
    assert by_start(answer.recalled) == {(b"", b"\x00:\xff"): [frozen(one, b"1", b"\xfe")]}
    assert answer.recalled.seen_at == told.started


async def test_an_epoch_is_recalled(store: Store, epoch: Begin, item: Callable[..., Item]) -> None:
    """With all that makes an item, in its order, and what the limit cost."""
    odd = item("é 😀.png", "data:image/png;base64,AA", trust="untrusted", type="note")
    one = epoch(
        "p", leading=(b"one", b"two", b"one"), library=(odd, item("a", "word " * 90), odd), reason="dead_weight",
        number=7, started=2.5, dropped=((b"a", b"b"), (b"\xff", b"")), rewritten=True,
    )  # fmt: skip
    await store.remember("c", [], one)
    assert (await store.recall("c")).recalled.epochs == {b"p": one}
    two = epoch("q", leading=(), library=())
    await store.remember("c", [], two)
    assert (await store.recall("c")).recalled.epochs == {b"p": one, b"q": two}


async def test_the_first_writer_of_an_epoch_wins(store: Store, epoch: Begin) -> None:
    """Of two that race, the other follows from its next request."""
    await store.remember("c", [], epoch("p", "a", started=1.0))
    await store.remember("c", [], epoch("p", "b", started=2.0, reason="limit"))
    assert (await store.recall("c")).recalled.epochs == {b"p": epoch("p", "a", started=1.0)}


async def test_an_epoch_and_its_messages_come_together(store: Store, epoch: Begin, entry: Make) -> None:
    """One write holds all that a request forwarded."""
    entries = [entry("k", "one", epoch="p"), entry("l", "two", b"1", epoch="p", started=2.0)]
    await store.remember("c", entries, epoch("p", "a"))
    recalled = (await store.recall("c")).recalled
    assert recalled.epochs == {b"p": epoch("p", "a")}
    assert by_start(recalled) == {(b"p", b"k"): [frozen(entries[0])], (b"p", b"l"): [frozen(entries[1], b"1")]}


async def test_a_conversation_is_stored_anew(store: Store, entry: Make, epoch: Begin) -> None:
    """What was stored of it goes, and what comes with that stands alone."""
    await store.remember("c", [entry("k"), entry("l")], epoch("p", "a"), {b"a": Link(b"", b"{}")})
    await store.remember("other", [entry("k")], None)
    await store.remember("c", [entry("m", started=2.0)], epoch("q", "b"), {b"b": Link(b"", b"{}")}, anew=True)
    recalled = (await store.recall("c")).recalled
    assert [place for _, place in recalled.log] == [b"m"]
    assert (list(recalled.epochs), list(recalled.links)) == ([b"q"], [b"b"])
    assert len((await store.recall("other")).recalled.log) == 1


async def test_links_are_recalled(store: Store, entry: Make) -> None:
    """A windowed client's own messages, by place; the first writer of each wins."""
    links = {b"a": Link(b"", b'{"a" : 1}'), b"\xff:": Link(b"a", b"\xff\x00"), b"c": Link(b"\xff:", b'{"a" : 1}')}
    await store.remember("c", [entry("k")], None, links)
    await store.remember("c", [], None, {b"a": Link(b"x", b"other")})
    for _ in range(2):
        assert (await store.recall("c")).recalled.links == links
    assert await store.forget("c") is True
    assert (await store.recall("c")).recalled.links == {}


async def test_recall_is_the_same_twice(store: Store, entry: Make, epoch: Begin) -> None:
    """The second time this process need not be sent the contents again, and knows them all the same."""
    await store.remember("c", [entry("k")], epoch("k", "a"))
    await store.remember("c", [entry("l", "content of k"), entry("l", "other")], epoch("l", "a", "b"))
    first, second = await store.recall("c"), await store.recall("c")
    assert first == second
    assert (len(first.recalled.log), len(first.recalled.epochs)) == (2, 2)


async def test_conversations_are_apart(store: Store, entry: Make, epoch: Begin) -> None:
    """Neither sees, counts or forgets what is the other's."""
    await store.remember("c", [entry("k", "a")], epoch("p", "a"))
    await store.remember("d", [entry("k", "b")], epoch("p", "b"))
    await store.seen("c", view(), Tally(prompt_tokens=1))
    found = (await store.recall("d")).recalled
    assert by_start(found) == {(b"e", b"k"): [frozen(entry("k", "b"))]}
    assert found.epochs == {b"p": epoch("p", "b")}
    assert await store.view("d") is None
    assert await store.forget("d") is True
    kept = (await store.recall("c")).recalled
    assert by_start(kept) == {(b"e", b"k"): [frozen(entry("k", "a"))]}
    assert kept.epochs == {b"p": epoch("p", "a")}


async def test_epochs_are_apart(store: Store, entry: Make) -> None:
    """The same words are forwarded in one form in each epoch, and answered in each."""
    one, two = entry("k", "a", epoch="p"), entry("k", "a", epoch="q", started=2.0)
    await store.remember("c", [one, two], None)
    await store.answered("c", two, [b"2"])
    assert by_start((await store.recall("c")).recalled) == {
        (b"p", b"k"): [frozen(one)], (b"q", b"k"): [frozen(two, b"2")],
    }  # fmt: skip


async def test_the_first_writer_of_an_attempt_wins(store: Store, entry: Make) -> None:
    """The same words with the same context again are the same attempt; the answers of both count."""
    await store.remember("c", [entry("k", "a", b"1", started=1)], None)
    await store.remember("c", [entry("k", "a", b"2", started=2)], None)
    assert by_start((await store.recall("c")).recalled) == {
        (b"e", b"k"): [frozen(entry("k", "a", started=1), b"1", b"2")]
    }


async def test_attempts_with_other_context_are_apart(store: Store, entry: Make) -> None:
    """Each has its own bytes and its own answers."""
    one, two = entry("k", "a", started=1), entry("k", "b", started=2)
    for tried, reply in ((one, b"1"), (two, b"2")):
        await store.remember("c", [tried], None)
        await store.answered("c", tried, [reply])
    assert by_start((await store.recall("c")).recalled) == {(b"e", b"k"): [frozen(one, b"1"), frozen(two, b"2")]}


async def test_all_answers_to_an_attempt_are_kept(store: Store, entry: Make) -> None:
    """An agent's steps and a regeneration add to what is known."""
    await store.remember("c", [entry("k")], None)
    await store.answered("c", entry("k"), [b"1", b"2"])
    await store.answered("c", entry("k"), [b"3", b"1"])
    assert by_start((await store.recall("c")).recalled) == {(b"e", b"k"): [frozen(entry("k"), b"1", b"2", b"3")]}


async def test_an_answer_to_nothing_is_no_message(store: Store, entry: Make) -> None:
    """What was never remembered is not recalled for having been answered."""
    await store.answered("c", entry("k"), [b"1"])
    assert (await store.recall("c")).recalled == Recalled()


async def test_seen_at_is_the_last_request(store: Store, entry: Make) -> None:
    """How long a conversation has been idle is told by it."""
    await store.remember("c", [entry("k", started=1.5)], None)
    await store.remember("c", [entry("l", started=9.5)], None)
    assert (await store.recall("c")).recalled.seen_at == 9.5


async def test_a_view_is_the_latest_and_its_counts_add_up(store: Store) -> None:
    """Layers as the last request left them; tokens of all requests."""
    await store.seen("c", view(at=5.0, turns=1), Tally(prompt_tokens=10, cached_tokens=0))
    await store.seen("c", view(at=6.0, turns=2), Tally(prompt_tokens=20, cached_tokens=8))
    found = await store.view("c")
    assert found == View(
        at=6.0, turns=2, layers=[["L1", 10, "ab"]], library=[["a.md", "note_context", "cd"]],
        requests=2, prompt_tokens=30, cached_tokens=8,
    )  # fmt: skip


async def test_forgotten_is_forgotten(store: Store, entry: Make, epoch: Begin) -> None:
    """Messages, epochs, contents, view and counts are gone, and a new start finds none of them."""
    await store.remember("c", [entry("k")], epoch("k", "a"))
    await store.answered("c", entry("k"), [b"1"])
    await store.seen("c", view(), Tally(prompt_tokens=10))
    assert await store.forget("c") is True
    assert (await store.recall("c")).recalled == Recalled()
    assert await store.view("c") is None
    assert await store.forget("c") is False
    await store.seen("c", view(), Tally(prompt_tokens=1))
    found = await store.view("c")
    assert found is not None
    assert (found.requests, found.prompt_tokens) == (1, 1)


async def test_counting_and_closing_never_fail(store: Store) -> None:
    """Whatever is under way."""
    store.count("tenant", Tally(prompt_tokens=5))
    store.count("tenant", Tally(prompt_tokens=5))
    await store.close()


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("conversation", "p", "c", "u"), ("conversation", "p", "c", "v")),
        (("conversation", "p", "c", "u"), ("conversation", "p", "cu", "")),
        (("conversation", "p", "c", ""), ("conversation", "q", "c", "")),
        (("partition", {"authorization": "a", "cookie": "b"}), ("partition", {"authorization": "ab", "cookie": ""})),
        (("partition", {"authorization": "a"}), ("partition", {"api-key": "a"})),
        (("partition", "acme"), ("partition", {"acme": ""})),
        (("partition", {}), ("partition", "")),
    ],
)
def test_keys_never_run_into_one_another(one: tuple[object, ...], two: tuple[object, ...]) -> None:
    """Different names and credentials have different digests, however they are cut."""
    keys = Keys(b"secret")
    (method, *first), (_, *second) = one, two
    assert getattr(keys, str(method))(*first) != getattr(keys, str(method))(*second)
    assert getattr(keys, str(method))(*first) == getattr(Keys(b"secret"), str(method))(*first)
    assert getattr(keys, str(method))(*first) != getattr(Keys(b"other"), str(method))(*first)


def test_keys_name_nobody() -> None:
    """A digest is hexadecimal and holds no part of a name; the order of headers does not matter."""
    keys = Keys(b"secret")
    found = keys.conversation(keys.partition({"b": "1", "a": "2"}), "chat", "\ud800user")
    assert len(found) == 32
    assert set(found) <= set("0123456789abcdef")
    assert keys.partition({"b": "1", "a": "2"}) == keys.partition({"a": "2", "b": "1"})


async def test_the_first_writer_of_a_set_of_tools_wins(store: Store) -> None:
    """Another order of the same set changes nothing; another set and another owner are apart."""
    await store.order("owner", (b"b", b"a"))
    await store.order("owner", (b"a", b"b"))
    await store.order("owner", (b"c", b"a", b"b"))
    assert set(await store.orders("owner", (b"a", b"b"))) == {(b"b", b"a"), (b"c", b"a", b"b")}
    assert await store.orders("other", (b"a", b"b")) == ()


async def test_sets_of_tools_are_bounded(store: Store) -> None:
    """A description that says the time is another set in every request; those known stay known."""
    for number in range(3 * MOST_SETS):
        await store.order("owner", (b"a", str(number).encode()))
    known = await store.orders("owner", (b"a", b"new"))
    assert len(known) == MOST_SETS
    assert (b"a", b"0") in known
    await store.order("owner", (b"0", b"a"))
    assert set(await store.orders("owner", (b"a", b"0"))) == set(known)
