"""What this process has found out about bytes it has seen: once each, and bounded."""

import contextlib
import tracemalloc

import orjson
import pytest

from proxy import ranks
from proxy.core import tokens
from proxy.core.items import Tags
from proxy.core.message import analyse
from proxy.core.models import describe
from proxy.errors import Odd
from proxy.memo import Analyst, Memo, TokenScale, count
from proxy.memory.store import Keys
from proxy.prices import Prices

RAW = orjson.dumps({"role": "user", "content": "<file path='a'>x</file> Why?"})


def test_a_memo_remembers() -> None:
    """Until it has been told of about as much again as it may hold."""
    memo: Memo[int] = Memo(max_bytes=100)
    assert memo.get(b"a") is None
    memo.put(b"a", 1, 10)
    assert memo.get(b"a") == 1


def test_what_is_asked_for_lives_on() -> None:
    """Two generations: the unused of the old one go."""
    memo: Memo[int] = Memo(max_bytes=100)
    memo.put(b"used", 1, 10)
    memo.put(b"unused", 2, 10)
    for number in range(30):
        memo.put(b"%d" % number, number, 10)
        assert memo.get(b"used") == 1
    assert memo.get(b"unused") is None
    assert memo.get(b"0") is None
    assert memo.get(b"29") == 29


def test_a_memo_is_bounded() -> None:
    """However much is put in and asked for, it holds no more than its bytes and one value."""
    memo: Memo[int] = Memo(max_bytes=1_000)
    for number in range(1_000):
        memo.put(b"%d" % number, number, 10)
        for old in range(number):
            memo.get(b"%d" % old)
    assert sum(memo.get(b"%d" % number) is not None for number in range(1_000)) <= 101


def test_each_distinct_message_is_analysed_once() -> None:
    """The second time costs nothing, and gives the same value as an analysis would."""
    analyst = Analyst(Tags.of(), max_bytes=1_000_000)
    one, two = analyst.reader(), analyst.reader()
    first = one(RAW)
    assert one.unseen_bytes == len(RAW)
    assert one(bytes(bytearray(RAW))) is analyst.analyse(RAW) is two(RAW) is first
    assert (one.unseen_bytes, two.unseen_bytes) == (len(RAW), 0)
    assert analyst.look(RAW) == (first, False)
    assert first == analyse(RAW, tags=Tags.of(), count=count)


def test_lines_weigh_what_they_keep() -> None:
    """A prompt of one long line is remembered with all its text, and counts for that."""
    analyst, tags = Analyst(Tags.of(), max_bytes=400_000), Tags.of()
    tracemalloc.start()
    for number in range(100):
        raw = orjson.dumps({"role": "system", "content": f"{number} " + "word " * 40_000})
        analyst.lines([analyse(raw, tags=tags, count=len)], b"key")
    del raw
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000


def test_a_message_weighs_its_role_and_calls() -> None:
    """Whatever a client writes there is held too."""
    analyst = Analyst(Tags.of(), max_bytes=4_000_000)
    tracemalloc.start()
    for number in range(60):
        raw = orjson.dumps({"role": f"{number}" + "r" * 500_000, "content": "x"})
        with contextlib.suppress(Odd):
            analyst.analyse(raw)
        call = {"id": f"{number}" + "c" * 500_000, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        raw = orjson.dumps({"role": "assistant", "content": None, "tool_calls": [call]})
        analyst.analyse(raw)
    del raw, call
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 8_000_000


def test_a_name_that_is_no_models_is_not_remembered() -> None:
    """Nor is its price looked for, nor a user's name of megabytes kept."""
    keys, prices = Keys(b"s"), Prices({})
    tracemalloc.start()
    for number in range(40):
        name = f"gpt-4o-{number}" + "x" * 500_000
        assert describe(name).name == "other"
        assert prices.of(name, "https://api.openai.com/v1", 1e9) is None
        keys.conversation("p", "c", name)
    del name
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2_000_000


def test_an_odd_message_stays_odd() -> None:
    """What could not be read is not remembered as something else."""
    analyst = Analyst(Tags.of(), max_bytes=1_000_000)
    for _ in range(2):
        with pytest.raises(Odd):
            analyst.analyse(b"[]")


@pytest.mark.parametrize("encoding", ["o200k_base", "cl100k_base"])
@pytest.mark.parametrize("max_bytes", [1, 1_000_000])
@pytest.mark.parametrize("text", ["", "short", "long " * 100, "é😀" * 50])
def test_a_scale_counts_as_tokens_does(encoding: ranks.Name, max_bytes: int, text: str) -> None:
    """With a memory or without, the first time and the second."""
    scale, exact = TokenScale(encoding, max_bytes=max_bytes), tokens.counter(ranks.load(encoding))
    raw = orjson.dumps({"role": "user", "content": text})
    for _ in range(2):
        assert scale.text(text) == exact(text)
        assert scale.message(raw, b"digest of " + raw) == tokens.message(raw, exact)
        assert scale.schema(raw) == tokens.schema(raw, exact)


def test_texts_messages_and_schemas_do_not_meet() -> None:
    """The same bytes weigh differently as each of them."""
    scale = TokenScale("o200k_base", max_bytes=1_000_000)
    text = '{"role":"user","content":"' + "word " * 50 + '"}'
    found = (scale.text(text), scale.schema(text.encode()), scale.message(text.encode(), b"digest"))
    assert len(set(found)) == 3
    assert found == (scale.text(text), scale.schema(text.encode()), scale.message(text.encode(), b"digest"))


@pytest.mark.parametrize("content", ["words", [{"type": "image_url", "image_url": {"url": "https://a/b.png"}}]])
def test_a_message_that_was_counted_is_not_read_again(content: object) -> None:
    """Its digest is enough, in each family: a long history costs a look-up a message, not its bytes."""
    scale = TokenScale("o200k_base", max_bytes=1_000_000, rules=describe("gpt-4o").media)
    raw = orjson.dumps({"role": "user", "content": content})
    counted = scale.message(raw, b"d" * 16)
    assert scale.message(b"", b"d" * 16) == counted
    other = scale.of(describe("claude-sonnet-4-5").media)
    assert other.message(raw, b"d" * 16) == tokens.message(raw, tokens.counter(ranks.load("o200k_base")), other._rules)
