"""What is learned of system prompts: shared through Redis, bounded, digests only."""

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from proxy.core.form import Form, Lessons
from proxy.core.known import Lesson, Standing
from proxy.core.lines import KEY_BYTES
from proxy.core.recipe import Recipe, Words
from proxy.core.template import Seen, Template
from proxy.memory.learned import MOST_KEPT, MOST_RECURRING, MOST_TEMPLATES, Book
from proxy.memory.packed import pack_form, pack_template, unpack_form, unpack_template
from proxy.memory.redis import RedisStore
from proxy.memory.store import Keys, Store

Connect = Callable[..., RedisStore]

ONE, TWO = (bytes([number]) * KEY_BYTES for number in (1, 2))
FORM = Form((ONE, TWO), frozenset({1}), (0, 2), frozenset({(ONE, b"")}), b"template")
TEMPLATE = Template(
    id=b"template", count=3, lines=(Seen(ONE, 0b111, 10), Seen(TWO, 0b101, 2)),
    lessons=Lessons(frozenset({(b"", ONE)}), frozenset({b"word"}), {(ONE, TWO): b"edit"}),
)  # fmt: skip
STOOD = Standing(
    FORM, (b"s" * 8,), (b"b" * 8, b"c" * 8), 2, b"",
    (Recipe(b"at", ((b"b" * 8, Words("\n\n", 3, " "), b"c" * 8), (b"b" * 8,))), Recipe(b"a", ((Words("", 1, ""),),))),
)  # fmt: skip


def form(number: int) -> Form:
    return Form(lines=(number.to_bytes(KEY_BYTES, "big"),))


def test_a_form_and_a_template_are_read_as_they_were_packed() -> None:
    """All of them, the empty ones too."""
    assert unpack_form(pack_form(FORM)[0]) == FORM
    assert unpack_form(pack_form(Form())[0]) == Form()
    assert unpack_template(pack_template(TEMPLATE)) == TEMPLATE
    assert pack_form(FORM)[1] != pack_form(Form())[1]


@pytest.mark.parametrize("packed", [b"", b"\xff", b"\x90", msgspec.msgpack.encode("text")])
def test_what_is_none_is_refused(packed: bytes) -> None:
    """By an error the store knows."""
    for unpack in (unpack_form, unpack_template):
        with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
            unpack(packed)


async def test_how_l1_stood_is_known_at_its_place(store: Store) -> None:
    """And how its turns are put back; elsewhere nothing is known."""
    await store.learn("t", b"place", STOOD, Lesson(1.0, TEMPLATE))
    await store.learn("t", b"place", STOOD, Lesson(1.0))
    learned = await store.learned("t", [b"place", b"elsewhere"], b"here")
    assert learned.standing == {b"place": (STOOD,)}
    assert learned.templates == (TEMPLATE,)
    assert (await store.learned("other", [b"elsewhere"], b"here")).templates == ()


async def test_items_that_recur_stand_in_the_order_they_first_did(store: Store) -> None:
    """Whatever comes later, and once each."""
    await store.learn("t", b"a", Standing(), Lesson(2.0, None, (b"z", b"a")))
    await store.learn("t", b"b", Standing(), Lesson(3.0, None, (b"b", b"z")))
    await store.learn("other", b"b", Standing(), Lesson(1.0, None, (b"x",)))
    await store.learn("t", b"c", Standing(), Lesson(9.0, None, (b"z",)))
    assert (await store.learned("t", (), b"here")).recurring == (b"z", b"a", b"b")


async def test_lineages_with_one_l1_and_other_items_are_told_apart(store: Store) -> None:
    """Two conversations that begin with the same words about two documents are two."""
    standing = [Standing(FORM, (item,), (b"both",), 3) for item in (b"one", b"two")]
    logs = (((b"one",),), ((Words("", 1, ""),),))
    standing += [Standing(FORM, calm=3, log=(Recipe(b"place", log),)) for log in logs]
    for each in standing:
        await store.learn("t", b"hi", each, Lesson(1.0))
    assert (await store.learned("t", [b"hi"], b"here")).standing[b"hi"] == tuple(standing)


async def test_few_lineages_that_begin_alike_are_told_apart(store: Store) -> None:
    """Of many the first."""
    for number in range(30):
        await store.learn("t", b"hi", Standing(form(number)), Lesson(1.0))
    assert len((await store.learned("t", [b"hi"], b"here")).standing[b"hi"]) == MOST_KEPT


async def test_replicas_learn_from_one_another(redis_url: str, raw: Any, connect: Connect) -> None:
    """What one forwarded, another follows; each knows what either learned of a template."""
    one, two = connect(redis_url), connect(redis_url)
    await one.learn("t", b"a", STOOD, Lesson(1.0, TEMPLATE))
    assert (await two.learned("t", [b"b", b"a"], b"here")).standing == {b"a": (STOOD,)}
    other = Template(id=b"template", count=4, lines=TEMPLATE.lines, lessons=Lessons(words=frozenset({b"more"})))
    await two.learn("t", b"c", Standing(form(1)), Lesson(1.0, other))
    (learned,) = (await one.learned("t", [b"c"], b"here")).templates
    assert (learned.count, learned.lessons.words) == (4, frozenset({b"word", b"more"}))
    await two.learn("t", b"d", Standing(FORM, (b"s",), (b"b",), -2), Lesson(9.0, None, (b"b", b"a")))
    seen = await one.learned("t", [b"d"], b"here")
    assert (seen.standing[b"d"], seen.recurring) == ((Standing(FORM, (b"s",), (b"b",), -2),), (b"b", b"a"))
    await one.close()
    await two.close()


async def test_what_a_replica_learns_is_known_where_the_next_conversation_begins(
    redis_url: str, raw: Any, connect: Connect
) -> None:
    """At once, however lately another has asked: both lay out the same new conversation alike."""
    one, two = connect(redis_url), connect(redis_url)
    assert (await two.learned("t", (), b"hi")).templates == ()
    await one.learn("t", b"a", STOOD, Lesson(1.0, TEMPLATE))
    assert (await two.learned("t", (), b"hi")).templates == (TEMPLATE,)
    more = dataclasses.replace(TEMPLATE, lessons=Lessons(words=frozenset({b"word", b"more"})))
    await one.learn("t", b"b", STOOD, Lesson(2.0, more))
    assert (await two.learned("t", (), b"hi")).templates[0].lessons.words == {b"word", b"more"}
    await one.learn("t", b"c", STOOD, Lesson(3.0, None, (b"item",)))
    assert (await two.learned("t", (), b"hi")).recurring == (b"item",)
    await one.learn("t", b"hi", STOOD, Lesson(4.0))
    assert (await two.learned("t", (), b"hi")).standing == {b"hi": (STOOD,)}
    await one.close()
    await two.close()


async def test_who_must_be_sure_asks_others_too(redis_url: str, raw: Any, connect: Connect) -> None:
    """Two lineages stood at one place, each known to one replica: both know of both."""
    one, two = connect(redis_url), connect(redis_url)
    other = Standing(FORM, brought=(b"other",))
    await one.learn("t", b"a", STOOD, Lesson(1.0))
    await two.learn("t", b"a", other, Lesson(1.0))
    assert (await one.learned("t", [b"a"], b"here")).standing[b"a"] == (STOOD,)
    for store in (one, two):
        assert {*(await store.learned("t", [b"a"], b"here", sure=True)).standing[b"a"]} == {STOOD, other}
        await store.close()


async def test_what_is_garbage_in_redis_is_left_out(redis_url: str, raw: Any, connect: Connect, told: Any) -> None:
    """And said to be an error; the request goes on with what is known here."""
    one, two = connect(redis_url), connect(redis_url)
    await one.learn("t", b"a", Standing(FORM), Lesson(1.0, TEMPLATE))
    for key in raw.keys("*:templates"):
        raw.hset(key, "x", b"\xff")
    learned = await two.learned("t", [b"a"], b"here")
    assert learned.templates in ((), (TEMPLATE,))
    assert told.errors == ["recall"]
    await one.close()
    await two.close()


async def test_nothing_in_redis_can_be_read_or_outlives_its_time(redis_url: str, raw: Any, connect: Connect) -> None:
    """Keys and values hold digests, and every key expires."""
    one = connect(redis_url)
    lesson = Lesson(1.0, TEMPLATE, (b"item",))
    await one.learn(Keys(b"s").partition("acme"), b"a" * 16, STOOD, lesson)
    keys = raw.keys("*")
    assert len(keys) == 5
    assert all(0 < raw.ttl(key) <= 60 and b"acme" not in key for key in keys)
    await one.close()


async def test_what_another_version_wrote_is_left_out(redis_url: str, raw: Any, connect: Connect) -> None:
    """A rolling upgrade is no outage: what can be read counts."""
    one, two = connect(redis_url), connect(redis_url)
    place = b"a" * 16
    await one.learn("t", place, STOOD, Lesson(1.0, TEMPLATE))
    [key] = [key for key in raw.keys("*") if b":at:" in key]
    for junk in (b"", b"junk", msgspec.msgpack.encode({"form": 1}), msgspec.msgpack.encode([1, 2])):
        raw.hset(key, junk, "")
    found = await two.learned("t", (place,), b"here", sure=True)
    assert found.standing[place] == (STOOD,)
    for store in (one, two):
        await store.close()


def test_a_log_weighs_what_it_holds() -> None:
    """A long one takes the room of many lineages."""
    book, long = Book(max_bytes=400_000), tuple(Recipe(b"place", ((b"item", Words("", 1, "")),)) for _ in range(64))
    for number in range(100):
        book.put(number.to_bytes(2, "big"), [Standing(FORM, log=long)])
    held = [number for number in range(100) if book.learned("t", [number.to_bytes(2, "big")]).standing]
    assert 3 < len(held) < 10


def test_the_book_is_bounded() -> None:
    """The least recently used goes first; forms that many share are held once."""
    book = Book(max_bytes=40_000)
    for number in range(1_000):
        book.put(number.to_bytes(2, "big"), [Standing(FORM)])
    held = [number for number in range(1_000) if book.learned("t", [number.to_bytes(2, "big")]).standing]
    assert held == list(range(1_000 - len(held), 1_000))
    assert 50 < len(held) < 70
    for number in range(1_000):
        book.put(b"x" + number.to_bytes(2, "big"), [Standing(form(number))])
    assert not book.learned("t", [b"\x03\xe7"]).standing


def test_recurring_items_are_bounded() -> None:
    """The first stay: their order is what conversations share."""
    book = Book(max_bytes=20_000)
    book.note("t", {number.to_bytes(2, "big"): float(number) for number in range(MOST_RECURRING + 5)})
    assert book.learned("t", ()).recurring == tuple(number.to_bytes(2, "big") for number in range(MOST_RECURRING))


def test_templates_are_bounded() -> None:
    """The one that was not met for longest goes first."""
    book = Book(max_bytes=20_000)
    for number in range(MOST_TEMPLATES + 4):
        book.take("t", Template(id=bytes([number]), count=1, lines=()))
        book.take("t", Template(id=b"\x00", count=1, lines=()))
    held = {template.id for template in book.learned("t", ()).templates}
    assert len(held) == MOST_TEMPLATES
    assert {b"\x00", bytes([MOST_TEMPLATES + 3])} <= held
    assert b"\x01" not in held


def test_templates_are_bounded_in_bytes() -> None:
    """Whoever asks with key after key takes no more; the latest stand."""
    book = Book(max_bytes=1_000_000)
    for number in range(100):
        seen = tuple(Seen(f"{number} {line}".encode(), 1, 10) for line in range(100))
        book.take(f"{number}", Template(id=b"t", count=1, lines=seen))
    held = [number for number in range(100) if book.learned(f"{number}", ()).templates]
    assert held == list(range(100 - len(held), 100))
    assert 10 < len(held) < 25


def test_places_of_lineages_are_kept_apart() -> None:
    """By conversation, end user and owner; each owner's lines have a key of their own."""
    keys = Keys(b"secret")
    places = {
        keys.place(owner, name, user, b"p") for owner in ("a", "b") for name in ("", "c") for user in ("", "u", "c")
    }
    assert len(places) == 12
    assert keys.lines("a") != keys.lines("b")


async def test_what_an_owner_teaches_redis_is_bounded(redis_url: str, raw: Any, connect: Connect) -> None:
    """However many different prompts and items it sends."""
    one = connect(redis_url)
    for number in range(600):
        item = number.to_bytes(8, "big")
        await one.learn("t", b"p", Standing(), Lesson(float(number), Template(id=item, count=1, lines=()), (item,)))
    assert raw.hlen("strata:4:lines:{t}:templates") <= MOST_TEMPLATES
    assert raw.hlen("strata:4:lines:{t}:recurring") <= MOST_RECURRING
    assert raw.hlen("strata:4:lines:{t}:at:70") == 1
    await one.close()


async def test_a_redis_that_failed_is_told_again(server: Any, connect: Connect, told: Any) -> None:
    """What was written a moment before it lost everything is not taken for written."""
    one, two = connect(server.url), connect(server.url)
    await one.learn("t", b"a", Standing(FORM), Lesson(1.0))
    server.kill()
    await one.learn("t", b"a", Standing(FORM), Lesson(1.0))
    server.start()
    await one.learn("t", b"b", Standing(FORM), Lesson(1.0))
    assert (await two.learned("t", [b"b"], b"here")).standing == {b"b": (Standing(FORM),)}
    await one.close()
    await two.close()
