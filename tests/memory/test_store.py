"""What every store does, in this process or in Redis."""

from collections.abc import Callable

import pytest

from proxy.core.items import Item
from proxy.core.lineage import Recalled, Stored
from proxy.memory.store import Keys, Store, Tally, Turn, View

Make = Callable[..., Turn]


def stored(turn: Turn, *replies: bytes) -> Stored:
    return Stored(started=turn.started, items=turn.items, replies=frozenset(replies))


def by_start(recalled: Recalled) -> dict[bytes, list[Stored]]:
    return {key: sorted(tries, key=lambda tried: tried.started) for key, tries in recalled.turns.items()}


def view(at: float = 5.0, turns: int = 2) -> View:
    return View(at=at, turns=turns, layers=[["L1", 10, "ab"]], library=[["a.md", "note_context", "cd"]])


async def test_nothing_is_known_of_an_unknown_conversation(store: Store) -> None:
    """Recall, view and forget say so, and nothing is degraded."""
    answer = await store.recall("c")
    assert (dict(answer.recalled.turns), answer.degraded, store.degraded) == ({}, False, False)
    assert await store.view("c") is None
    assert await store.forget("c") is False


async def test_what_is_remembered_is_recalled(store: Store, turn: Make, item: Callable[..., Item]) -> None:
    """With all that makes an item, in its order."""
    odd = item("é 😀.png", "data:image/png;base64,AA", trust="untrusted", type="note")
    one = Turn(key=b"k", started=1.5, items=(odd, *turn("k", "a", "b").items))
    await store.remember("c", one)
    answer = await store.recall("c")
    assert by_start(answer.recalled) == {b"k": [stored(one)]}
    assert answer.recalled.turns[b"k"][0].items[0].promotable is False


async def test_recall_is_the_same_twice(store: Store, turn: Make) -> None:
    """The second time this process need not be sent the contents again, and knows them all the same."""
    await store.remember("c", turn("k", "a"))
    await store.remember("c", turn("l", "a", "b"))
    first, second = await store.recall("c"), await store.recall("c")
    assert first == second
    assert len(first.recalled.turns) == 2


async def test_conversations_are_apart(store: Store, turn: Make) -> None:
    """Neither sees, counts or forgets what is the other's."""
    await store.remember("c", turn("k", "a"))
    await store.remember("d", turn("k", "b"))
    await store.seen("c", view(), Tally(prompt_tokens=1))
    assert by_start((await store.recall("d")).recalled) == {b"k": [stored(turn("k", "b"))]}
    assert await store.view("d") is None
    assert await store.forget("d") is True
    assert by_start((await store.recall("c")).recalled) == {b"k": [stored(turn("k", "a"))]}


async def test_the_first_writer_of_an_attempt_wins(store: Store, turn: Make) -> None:
    """The same words with the same context again are the same attempt."""
    await store.remember("c", turn("k", "a", started=1))
    await store.remember("c", turn("k", "a", started=2))
    assert by_start((await store.recall("c")).recalled) == {b"k": [stored(turn("k", "a", started=1))]}


async def test_attempts_with_other_context_are_apart(store: Store, turn: Make) -> None:
    """Each has its own items and its own answers."""
    one, two = turn("k", "a", started=1), turn("k", "b", started=2)
    for tried, reply in ((one, b"1"), (two, b"2")):
        await store.remember("c", tried)
        await store.answered("c", tried, [reply])
    assert by_start((await store.recall("c")).recalled) == {b"k": [stored(one, b"1"), stored(two, b"2")]}


async def test_all_answers_to_an_attempt_are_kept(store: Store, turn: Make) -> None:
    """An agent's steps and a regeneration add to what is known."""
    await store.remember("c", turn("k", "a"))
    await store.answered("c", turn("k", "a"), [b"1", b"2"])
    await store.answered("c", turn("k", "a"), [b"3", b"1"])
    assert by_start((await store.recall("c")).recalled) == {b"k": [stored(turn("k", "a"), b"1", b"2", b"3")]}


async def test_an_answer_to_nothing_is_no_turn(store: Store, turn: Make) -> None:
    """What was never remembered is not recalled for having been answered."""
    await store.answered("c", turn("k", "a"), [b"1"])
    assert dict((await store.recall("c")).recalled.turns) == {}


async def test_a_turn_without_items_is_a_turn(store: Store, turn: Make) -> None:
    """It can be matched all the same."""
    await store.remember("c", turn("k"))
    assert by_start((await store.recall("c")).recalled) == {b"k": [stored(turn("k"))]}


async def test_a_view_is_the_latest_and_its_counts_add_up(store: Store) -> None:
    """Layers as the last request left them; tokens of all requests."""
    await store.seen("c", view(at=5.0, turns=1), Tally(prompt_tokens=10, cached_tokens=0))
    await store.seen("c", view(at=6.0, turns=2), Tally(prompt_tokens=20, cached_tokens=8))
    found = await store.view("c")
    assert found == View(
        at=6.0, turns=2, layers=[["L1", 10, "ab"]], library=[["a.md", "note_context", "cd"]],
        requests=2, prompt_tokens=30, cached_tokens=8,
    )  # fmt: skip


async def test_forgotten_is_forgotten(store: Store, turn: Make) -> None:
    """Turns, contents, view and counts are gone, and a new start finds none of them."""
    await store.remember("c", turn("k", "a"))
    await store.answered("c", turn("k", "a"), [b"1"])
    await store.seen("c", view(), Tally(prompt_tokens=10))
    assert await store.forget("c") is True
    assert dict((await store.recall("c")).recalled.turns) == {}
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
