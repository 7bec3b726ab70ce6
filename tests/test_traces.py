"""The prompt before, of each lineage: found again, bounded, and gone with its conversation."""

from proxy.core.divergence import Piece, Trace
from proxy.traces import Traces


def trace(at: float, text: str = "L1") -> Trace:
    return Trace(at, (), (Piece("L1", 0, text.encode(), 1), Piece("L5", 1, f"{at}".encode(), 1)))


def test_the_prompt_before_is_found_by_place_then_by_name() -> None:
    """By name only one that begins with the same L1."""
    traces = Traces(max_bytes=10_000, ttl_seconds=60)
    one, two = trace(1.0), trace(2.0, "Other")
    traces.put(one, [b"place", b"name"])
    assert traces.before(trace(3.0), [b"none", b"place"], [b"name"]) is one
    assert traces.before(trace(3.0), [b"none"], [b"name"]) is one
    traces.put(two, [b"name"])
    assert traces.before(trace(3.0), [b"none"], [b"name"]) is None


def test_a_prompt_is_kept_no_longer_than_its_conversation() -> None:
    """By the tenant's time to live, whether or not anybody asks for it."""
    traces = Traces(max_bytes=10_000, ttl_seconds=60)
    traces.put(trace(0.0), [b"short"], ttl_seconds=10)
    traces.put(trace(0.0), [b"usual"])
    assert traces.before(trace(5.0), [b"short"], []) is not None
    assert traces.before(trace(11.0), [b"short"], []) is None
    assert traces.before(trace(60.0), [b"usual"], []) is not None
    traces.put(trace(61.0), [b"new"])
    assert {*traces._held} == {b"new"}


def test_a_conversations_prompts_go_with_it() -> None:
    """All of them, and nobody else's."""
    traces = Traces(max_bytes=10_000, ttl_seconds=60)
    traces.put(trace(1.0), [b"one", b"name"], of="c")
    traces.put(trace(2.0), [b"two", b"name"], of="c")
    traces.put(trace(3.0), [b"other"])
    traces.forget("c")
    assert [traces.before(trace(4.0), [key], []) is not None for key in (b"one", b"two", b"name", b"other")] == [
        False, False, False, True,
    ]  # fmt: skip


def test_traces_are_bounded() -> None:
    """The oldest go first."""
    traces = Traces(max_bytes=50_000, ttl_seconds=60)
    for number in range(100):
        traces.put(trace(float(number) / 100, "x" * 5_000), [b"%d" % number])
    assert traces.before(trace(1.0), [b"0"], []) is None
    assert traces.before(trace(1.0), [b"99"], []) is not None
    assert len(traces._held) < 15
