"""`strata replay`: recorded traffic as sent and in layers; tables, JSON, a picture; files larger than memory."""

from __future__ import annotations

import io
import tracemalloc
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner, Result

from proxy.cli import main
from proxy.core.policy import Policy
from proxy.core.price import Price, Rates
from proxy.core.profile import Profile
from proxy.memo import TokenScale
from proxy.replay import Recorded, Replay, Report, Skipped, lines
from proxy.replaying import picture
from proxy.simulator.accounting import OPENAI, PromptCache
from proxy.simulator.prompt import render as render_prompt
from proxy.simulator.tokens import tokenizer

MODEL = "gpt-5.1"
POLICY = Policy(
    mode="layered", promotion="deferred", budget_tokens=None, reserve_tokens=4_096, over_budget="forward",
    profile=Profile(),
)  # fmt: skip
RULES = "\n".join(f"Rule {number} stands for every customer and every order." for number in range(150))
PRICE = Price(((0, Rates(input=Decimal(1), cached_read=Decimal("0.1"), cached_write=Decimal(1), output=Decimal(1))),))
Body = dict[str, Any]


def conversation(name: str, turns: int, *, clock: bool, start: float = 1_795_993_200.0) -> Iterator[Body]:
    """Yield the requests of a conversation as lines of a file."""
    talk: list[Body] = []
    for turn in range(turns):
        system = f"You help.\nThe time is 10:{turn:02}.\n{RULES}" if clock else RULES
        talk.append({"role": "user", "content": f"Question {turn} of {name}: what about order {turn}?"})
        yield {
            "conversation": name,
            "at": start + 7.0 * turn,
            "body": {"model": MODEL, "messages": [{"role": "system", "content": system}, *talk]},
        }
        talk.append({"role": "assistant", "content": f"Answer {turn} of {name}: the order is on its way."})


def traffic(found: Sequence[Body]) -> io.BytesIO:
    return io.BytesIO(b"".join(orjson.dumps(line) + b"\n" for line in found))


def played(found: Sequence[Body] | io.BytesIO, **more: Any) -> Report:
    file = found if isinstance(found, io.BytesIO) else traffic(found)
    scale = TokenScale("o200k_base", max_bytes=10_000_000)
    replay = Replay(POLICY, scale, price=lambda *_: PRICE, max_bytes=10_000_000)
    return replay.play(lines(file, read=lambda _: None, whole=more.get("whole", False), model=MODEL, now=1e9))


def simulated(found: Sequence[Body]) -> tuple[int, int]:
    """Return prompt and cached tokens of bodies at the simulated provider."""
    cache, words = PromptCache(OPENAI), tokenizer(MODEL)
    charges = [cache.charge(render_prompt(line["body"], words).tokens, now=line["at"], partition="p") for line in found]
    return sum(charge.prompt_tokens for charge in charges), sum(charge.cached_tokens for charge in charges)


@pytest.mark.parametrize("clock", [False, True])
def test_what_was_sent_costs_what_the_provider_says(clock: bool) -> None:
    """Within three per cent of the simulated provider's own count: steps of 128 tokens fall where counts say."""
    found = [line for name in "abc" for line in conversation(name, 12, clock=clock)]
    prompt, cached = simulated(found)
    report = played(found)
    assert report.requests == 36
    assert report.as_sent.input_tokens == pytest.approx(prompt, rel=0.02)
    assert report.as_sent.uncached_tokens == pytest.approx(prompt - cached, rel=0.03)
    assert sum(report.as_sent.causes.values()) == report.as_sent.uncached_tokens


def test_append_only_traffic_is_the_same_in_layers() -> None:
    """To the token, and the same money; nothing broke."""
    report = played(list(conversation("a", 12, clock=False)))
    assert report.layered.uncached_tokens == report.as_sent.uncached_tokens
    assert report.layered.usd == report.as_sent.usd
    assert not report.breaks
    assert "changed" not in report.as_sent.causes


def test_a_clock_is_named_and_what_layers_would_save_is_counted() -> None:
    """By layer and kind, in tokens and in money, and which conversations are worst."""
    found = [*conversation("long", 20, clock=True), *conversation("short", 3, clock=True)]
    report = played(found)
    assert report.breaks["L1", "clock"] == 21
    assert set(report.breaks) == {("L1", "clock")}
    assert report.as_sent.causes["changed"] > 0.8 * report.as_sent.uncached_tokens
    assert report.layered.uncached_tokens < 0.4 * report.as_sent.uncached_tokens
    assert report.layered.usd < report.as_sent.usd
    million = Decimal(1_000_000)
    assert report.as_sent.usd == (
        report.as_sent.uncached_tokens / million + report.as_sent.cached_tokens / million / 10
    )
    assert [name for name, _, _ in report.worst] == ["long", "short"]
    assert sum(own for _, own, _ in report.worst) == report.as_sent.uncached_tokens


def test_a_pause_longer_than_the_lifetime_is_expired() -> None:
    """On the traffic's own clock."""
    first, second = conversation("a", 2, clock=False)
    report = played([first, {**second, "at": first["at"] + 4_000.0}])
    assert report.as_sent.causes["expired"] > 1_000
    assert report.as_sent.cached_tokens == 0


def test_what_was_reported_is_a_line_of_its_own() -> None:
    """As OpenAI writes usage and as Anthropic does; requests without are left out of it."""
    sent = list(conversation("a", 3, clock=False))
    sent[0]["usage"] = {"prompt_tokens": 1_000, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 640}}
    sent[1]["usage"] = {"input_tokens": 100, "cache_read_input_tokens": 900, "output_tokens": 1}
    report = played(sent)
    assert (report.recorded.input_tokens, report.recorded.cached_tokens) == (2_000, 1_540)
    assert report.reported == 2
    assert 0 < report.recorded_as_sent.input_tokens < report.as_sent.input_tokens
    assert report.told()["recorded"]["uncached_tokens"] == 460  # type: ignore[index]
    assert played(sent[2:]).told()["recorded"] is None


def test_a_line_may_be_a_body_alone() -> None:
    """Its conversation is what it says of itself; times are made up, five seconds apart."""
    bodies = [{**line["body"], "metadata": {"conversation_id": "mine"}} for line in conversation("a", 3, clock=False)]
    found = list(lines(traffic(bodies), read=lambda _: None, whole=False, model="", now=100.0))
    assert [each.at for each in found if isinstance(each, Recorded)] == [105.0, 110.0, 115.0]
    assert {each.conversation for each in found if isinstance(each, Recorded)} == {"mine"}
    assert played(bodies).as_sent.cached_tokens > 0


def test_conversations_recorded_whole_are_their_requests() -> None:
    """Each prefix up to a user message or the last of a run of tool messages; the same result as request by request."""
    requests = list(conversation("a", 6, clock=False))
    whole = {"conversation": "a", "messages": requests[-1]["body"]["messages"]}
    by_line, by_whole = played(requests), played([whole], whole=True)
    assert by_whole.requests == 6
    assert by_whole.as_sent == by_line.as_sent
    tools = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}}
                                             for i in "12"]},
        {"role": "tool", "tool_call_id": "1", "content": "a"},
        {"role": "tool", "tool_call_id": "2", "content": "b"},
    ]  # fmt: skip
    assert played([{"conversation": "t", "messages": tools}], whole=True).requests == 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"nope", "no JSON object"),
        (b"[1]", "Expected `object`, got `array`"),
        (b'{"at": "noon", "body": {}}', "Expected `float | null`, got `str` - at `$.at`"),
        (b'{"at": -1, "body": {}}', "Expected `float` >= 0.0 - at `$.at`"),
        (b'{"at": 1e308, "body": {}}', "Expected `float` < 1e+20 - at `$.at`"),
        (b'{"conversation": 5}', "Expected `str | null`, got `int` - at `$.conversation`"),
        (b"[" * 100_000, "Expected `object`, got `array`"),
        (b"\xff\xfe", "no JSON object"),
        (b'{"model": "m"}', "no_messages"),
        (b'{"body": {"messages": 7}}', "no_messages"),
    ],
)
def test_what_is_no_request_is_counted_and_the_rest_is_played(line: bytes, why: str) -> None:
    """A line that cannot be read says why."""
    good = traffic(list(conversation("a", 2, clock=False))).getvalue()
    report = played(io.BytesIO(line + b"\n\n" + good))
    assert dict(report.skipped) == {why: 1}
    assert report.requests == 2


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"conversation": "a"}', "no conversation: messages"),
        (b'{"conversation": "a", "messages": null}', "no conversation: messages"),
        (b'{"conversation": "a", "messages": [{"role": ["x"]}]}', "no conversation: messages"),
        (b'{"conversation": "a", "messages": [7]}', "no conversation: messages"),
    ],
)
def test_what_is_no_conversation_is_counted(line: bytes, why: str) -> None:
    """Not passed over in silence; numbers of any size are the client's business."""
    good = b'{"conversation": "b", "messages": [{"role": "user", "content": "hi", "n": %d}]}' % 10**30
    report = played(io.BytesIO(line + b"\n" + good), whole=True)
    assert dict(report.skipped) == {why: 1}
    assert report.requests == 1


@pytest.mark.parametrize("factor", [1, 10**3, 10**6, 10**9])
def test_times_may_be_in_smaller_units(factor: int) -> None:
    """A time in milliseconds is told by its size; a mark at the file's beginning is passed over."""
    found = [{**line, "at": line["at"] * factor} for line in conversation("a", 2, clock=False)]
    file = io.BytesIO(b"\xef\xbb\xbf" + traffic(found).getvalue())
    times = [each.at for each in lines(file, read=lambda _: None, whole=False, model="", now=0.0)
             if isinstance(each, Recorded)]  # fmt: skip
    assert times == pytest.approx([1_795_993_200.0, 1_795_993_207.0], abs=0.5)


def test_what_a_capture_left_out_is_told() -> None:
    """Its last line says how many."""
    found = list(lines(io.BytesIO(b'{"left_out": 3}\n'), read=lambda _: None, whole=False, model="", now=0.0))
    assert [each.count for each in found if isinstance(each, Skipped)] == [3]


def test_a_file_is_read_a_line_at_a_time() -> None:
    """What is held is much less than the file, which is told of as it is read."""
    size = 0

    def endless() -> Iterator[bytes]:
        nonlocal size
        for number in range(4):
            for line in conversation(f"c{number}", 30, clock=True):
                line["body"]["user"] = "somebody" * 12_000
                raw = orjson.dumps(line) + b"\n"
                size += len(raw)
                yield raw

    taken: list[int] = []
    replay = Replay(POLICY, TokenScale("o200k_base", max_bytes=500_000), price=lambda *_: PRICE, max_bytes=500_000)
    tracemalloc.start()
    try:
        replay.play(lines(endless(), read=taken.append, whole=False, model="", now=0.0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(taken), sum(taken)) == (120, size)
    assert size > 10_000_000
    assert peak < size / 2


def test_the_picture_is_an_svg_with_the_numbers_in_it() -> None:
    """Each bar says in its title what it is; bars are as long as their tokens."""
    report = played(list(conversation("a", 20, clock=True)))
    root = ET.fromstring(picture(report))
    space = "{http://www.w3.org/2000/svg}"
    bars = {bar.find(f"{space}title").text: float(bar.attrib["width"])  # type: ignore[union-attr]
            for bar in root.iter(f"{space}rect") if bar.find(f"{space}title") is not None}  # fmt: skip
    own, mine = report.as_sent, report.layered
    assert bars[f"as sent: uncached {own.uncached_tokens:,} tokens"] == pytest.approx(
        620 * own.uncached_tokens / max(own.input_tokens, mine.input_tokens), abs=0.1
    )
    assert f"in layers: cached {mine.cached_tokens:,} tokens" in bars
    assert ET.fromstring(picture(Report())) is not None


def cli(*args: str) -> Result:
    return CliRunner().invoke(main, ["replay", *args], env={"STRATA_UPSTREAM_URL": "http://127.0.0.1:1/v1"})


def test_the_command_prints_tables_and_writes_files(tmp_path: Path) -> None:
    """What stands in one stands in the other; models without a price are said."""
    file = tmp_path / "traffic.jsonl"
    file.write_bytes(traffic(list(conversation("a", 8, clock=True))).getvalue() + b"nope\n")
    result = cli(str(file), "--json", str(tmp_path / "r.json"), "--svg", str(tmp_path / "r.svg"))
    assert result.exit_code == 0, result.output
    told = orjson.loads((tmp_path / "r.json").read_bytes())
    assert told["requests"] == 8
    assert told["breaks"] == [{"layer": "L1", "kind": "clock", "count": 7}]
    assert told["unpriced_requests"] == 8
    for words in ("8 requests", "as sent", "in layers", f"{told['as_sent']['uncached_tokens']:,}", "L1: clock",
                  "8 requests are of models without a price", "skipped 1: no JSON object"):  # fmt: skip
        assert words in result.output
    assert (tmp_path / "r.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("given", "saves"),
    [({}, True), ({"STRATA_MODE": "observe"}, True), ({"STRATA_CURRENT_VALUES": "false"}, False)],
)
def test_the_plan_is_the_settings_in_layers(given: dict[str, str], saves: bool, tmp_path: Path) -> None:
    """Whoever only observes wants to know what layers would save."""
    file = tmp_path / "traffic.jsonl"
    file.write_bytes(traffic(list(conversation("a", 20, clock=True))).getvalue())
    asked = ["replay", str(file), "--json", str(tmp_path / "r.json")]
    result = CliRunner().invoke(main, asked, env={"STRATA_UPSTREAM_URL": "http://127.0.0.1:1/v1", **given})
    assert result.exit_code == 0, result.output
    told = orjson.loads((tmp_path / "r.json").read_bytes())
    own, mine = told["as_sent"]["uncached_tokens"], told["layered"]["uncached_tokens"]
    assert (mine < own / 2) is saves


def test_the_settings_in_force_hold(tmp_path: Path) -> None:
    """A tag of one's own marks context: what is attached each turn becomes a reference."""
    page = "<wiki_page>\n" + "The harbour is full of ships. " * 200 + "\n</wiki_page>"
    talk: list[Body] = []
    found = []
    for turn in range(5):
        talk.append({"role": "user", "content": f"{page}\nQuestion {turn}?"})
        found.append({"conversation": "a", "at": 1e9 + turn, "body": {"model": MODEL, "messages": list(talk)}})
        talk.append({"role": "assistant", "content": "Yes."})
    file = tmp_path / "traffic.jsonl"
    file.write_bytes(traffic(found).getvalue())
    tokens = {}
    for tags in ("", "wiki_page"):
        environment = {"STRATA_UPSTREAM_URL": "http://127.0.0.1:1/v1", "STRATA_CONTEXT_TAGS": tags}
        out = tmp_path / f"{tags}.json"
        result = CliRunner().invoke(main, ["replay", str(file), "--json", str(out)], env=environment)
        assert result.exit_code == 0, result.output
        tokens[tags] = orjson.loads(out.read_bytes())["layered"]["input_tokens"]
    assert tokens["wiki_page"] < 0.5 * tokens[""]


def test_names_are_printed_as_they_are_and_files_come_first(tmp_path: Path) -> None:
    """Brackets are no markup."""
    file = tmp_path / "traffic.jsonl"
    sent = [{**line, "conversation": "[/x]"} for line in conversation("a", 2, clock=False)]
    sent[1]["body"]["model"] = "[red]odd"
    file.write_bytes(traffic(sent).getvalue())
    result = cli(str(file))
    assert result.exit_code == 0, result.output
    assert "[/x]" in result.output
    assert "[red]odd" in result.output
    piped = CliRunner().invoke(
        main, ["replay", "-"], input=file.read_bytes(), env={"STRATA_UPSTREAM_URL": "http://a/v1"}
    )
    assert piped.exit_code == 0, piped.output


def test_a_file_without_requests_and_a_place_that_cannot_be_written_are_said(tmp_path: Path) -> None:
    """The place before anything is played."""
    file = tmp_path / "empty.jsonl"
    file.write_bytes(b"\n")
    empty = cli(str(file))
    assert empty.exit_code == 1
    assert "no line of it is a chat request" in empty.output
    nowhere = cli(str(file), "--svg", str(tmp_path / "none" / "r.svg"))
    assert nowhere.exit_code == 2
    assert "--svg" in nowhere.output
    assert cli(str(tmp_path / "none.jsonl")).exit_code == 2
