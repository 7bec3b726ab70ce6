"""Field failures of kinds A and F that this slice can hold: what breaks a prompt cache, and whose turn is whose."""

import asyncio
from collections.abc import Mapping, Sequence

import orjson
import pytest

from tests.cases.conftest import (
    CHAT_ANSWER,
    Seen,
    Start,
    Strata,
    Upstream,
    Wire,
    assistant,
    call,
    chat,
    chat_answer,
    note,
    result,
    roles,
    system,
    untold,
    user,
    without_usage_wish,
    words,
)

ARGUMENTS = '{"path": "n.txt",  "body":"\\u00e9", "z":1.0, "a":[ ]}'
ARGUMENTS_RAW = orjson.dumps(ARGUMENTS).replace("é".encode(), b"\\u00e9")

PROMOTIONS = pytest.mark.parametrize("promotion", ["deferred", "eager"])
NAMED = [{}, {"x-strata-conversation": "c-1"}]
NAMES = ["anonymous", "named"]


@pytest.mark.parametrize("named", NAMED, ids=NAMES)
async def test_c08_call_arguments_are_never_parsed(start: Start, upstream: Upstream, named: Mapping[str, str]) -> None:
    """Arguments of a past call keep double spaces, escapes, numbers and key order on every later turn."""
    strata = await start(budget_tokens=100_000)
    messages = [
        system("Be brief."),
        user(note("log.md") + "\n\nWrite it down."),
        {"role": "assistant", "content": None, "tool_calls": [call("c1", "write", ARGUMENTS)]},
        result("c1", ARGUMENTS),
    ]
    for turn in range(3):
        messages += [assistant("Done."), user(f"{note('log.md')}\n\nAnd then? {turn}")]
        await strata.post(chat(*messages), named)
    for body in upstream.bodies:
        assert body.count(ARGUMENTS_RAW) == 2
        forwarded = orjson.loads(body)["messages"]
        assert forwarded[2]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


async def test_c08_arguments_survive_a_cut(start: Start, upstream: Upstream) -> None:
    """Arguments that are kept when older turns go are spelled as before."""
    strata = await start(budget_tokens=1_500, output_reserve_tokens=100)
    old = [message for turn in range(8) for message in (user(words(220, f"t{turn}")), assistant("Done."))]
    last = [
        user("Write it down."),
        {"role": "assistant", "content": None, "tool_calls": [call("c1", "write", ARGUMENTS)]},
        result("c1", ARGUMENTS),
    ]
    answer = await strata.post(chat(*old, *last))
    assert int(answer.headers["x-strata-dropped-turns"]) > 0
    assert upstream.bodies[0].count(ARGUMENTS_RAW) == 2


def tool_talk(turns: int, size: int) -> list[dict[str, object]]:
    """Return a turn whose tool said `size` tokens, and short turns behind it."""
    return [
        system("You keep a tide table."),
        user("Read the log."),
        {"role": "assistant", "content": None, "tool_calls": [call("c1")]},
        result("c1", words(size)),
        assistant("I have read it."),
        *(message for turn in range(turns) for message in (user(f"Question {turn}?"), assistant(f"Answer {turn}."))),
    ]


@pytest.mark.parametrize("named", NAMED, ids=NAMES)
async def test_c13_old_results_stay_as_they_are(start: Start, upstream: Upstream, named: Mapping[str, str]) -> None:
    """Under budget an old tool result of 8 KB is forwarded byte for byte on each of six further turns."""
    strata = await start(budget_tokens=4_000, output_reserve_tokens=500)
    talk = tool_talk(6, 1_900)
    assert len(orjson.dumps(talk[3])) > 8_000
    for end in range(5, len(talk), 2):
        sent = chat(*talk[:end], user("Next?"))
        await strata.post(sent, named)
        assert upstream.bodies[-1] == orjson.dumps(sent)
    assert len(upstream.seen) == 6


async def test_c13_whole_turns_go_and_nothing_is_rewritten(start: Start, upstream: Upstream) -> None:
    """Over budget whole turns go, the call with its result; behind a line that says so stands what the client sent."""
    strata = await start(budget_tokens=2_000, output_reserve_tokens=500)
    messages = [*tool_talk(2, 1_200), *(user(words(150, f"t{turn}")) for turn in range(3)), user("Next?")]
    await strata.post(chat(*messages))
    forwarded = upstream.bodies[0]
    sent = untold(orjson.loads(forwarded)["messages"])
    kept = [message for message in messages if message in sent]
    assert sent == kept
    assert "tool" not in roles(forwarded)
    assert [kept[0], kept[-1]] == [messages[0], messages[-1]]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking_blocks", "x_vendor"])
@pytest.mark.parametrize("named", NAMED, ids=NAMES)
async def test_c14_fields_of_old_turns_stay(
    start: Start, upstream: Upstream, named: Mapping[str, str], field: str
) -> None:
    """Reasoning and unknown fields of assistant messages pass unchanged on the turn after, and on all later ones."""
    value: object = (
        [{"type": "thinking", "thinking": "x", "signature": "s"}] if field == "thinking_blocks" else "weighing"
    )
    strata = await start(budget_tokens=100_000)
    messages = [system("Be brief."), user("First?")]
    for turn in range(4):
        messages += [{"role": "assistant", "content": "ok", field: value}, user(f"Then {turn}?")]
        sent = chat(*messages)
        await strata.post(sent, named)
        assert upstream.bodies[-1] == orjson.dumps(sent)


async def say(strata: Strata, upstream: Upstream, name: str, *messages: object) -> bytes:
    """Send a turn of a named conversation and return what was forwarded."""
    answer = await strata.post(chat(*messages), {"x-strata-conversation": name})
    assert answer.status_code in {200, 500}
    return upstream.bodies[-1]


def asked(question: str, *attached: str) -> dict[str, object]:
    """Return a user message with context blocks before the question."""
    return user("\n\n".join([*(note(name) for name in attached), question]))


LEAD = system("You keep a tide table.")
DONE = assistant("Done.")


@PROMOTIONS
async def test_c16_a_side_request_leaves_the_main_conversation_alone(
    start: Start, upstream: Upstream, promotion: str
) -> None:
    """A title request under the same name neither changes nor joins the main conversation's next turn."""
    strata = await start(promotion=promotion)
    second = [LEAD, user("Sum it up."), DONE, asked("And the crew?", "crew.md")]
    third = [LEAD, user("Sum it up."), DONE, user("And the crew?"), DONE, user("More?")]
    title = [system("Give this chat a title."), user(f"{note('log.md')}\n\n{note('other.md')}\n\nSum it up.\n\nDone.")]
    for name, side in (("quiet", False), ("busy", True)):
        await say(strata, upstream, name, LEAD, asked("Sum it up.", "log.md"))
        if side:
            await say(strata, upstream, name, *title)
        await say(strata, upstream, name, *second)
        if side:
            await say(strata, upstream, name, *title, DONE, user("Shorter."))
        await say(strata, upstream, name, *third)
    quiet, busy = upstream.bodies[:3], upstream.bodies[3:]
    assert [busy[0], busy[2], busy[4]] == quiet
    assert b"other.md" not in quiet[2]
    assert busy[1] == orjson.dumps(chat(*title))


@PROMOTIONS
async def test_c16_a_side_request_with_the_same_words_forks(start: Start, upstream: Upstream, promotion: str) -> None:
    """A side request that repeats the main history word for word, and asks another thing, adds nothing to it."""
    strata = await start(promotion=promotion)
    history = [LEAD, user("Sum it up."), DONE]
    await say(strata, upstream, "s", LEAD, asked("Sum it up.", "log.md"))
    await say(strata, upstream, "s", *history, asked("Suggest three tags.", "tags.md"))
    main = await say(strata, upstream, "s", *history, user("More?"))
    then = await say(strata, upstream, "s", *history, user("More?"), DONE, user("Still more?"))
    assert b"tags.md" not in main
    assert b"tags.md" not in then
    assert orjson.loads(main)["messages"] == orjson.loads(then)["messages"][:4]


MARK = {"type": "ephemeral"}
PARTS = [
    {"type": "text", "text": "You keep a tide table. " + words(60)},
    {"type": "text", "text": "Use metres.", "cache_control": MARK},
]


@pytest.mark.parametrize("stream", [False, True])
async def test_c17_keys_headers_parts_and_marks_arrive(start: Start, upstream: Upstream, stream: bool) -> None:
    """The client's cache key, affinity header, system parts and cache marks reach the upstream as they were sent."""
    strata = await start()
    sent = chat(
        {"role": "system", "content": PARTS},
        {"role": "user", "content": [{"type": "text", "text": "Hello", "cache_control": MARK}]},
        prompt_cache_key="k1",
        prompt_cache_retention="24h",
        **({"stream": True} if stream else {}),
    )
    await strata.post(sent, {"x-session-affinity": "pod-7", "x-client-request-id": "r-1"})
    forwarded = upstream.bodies[0]
    assert (without_usage_wish(forwarded) if stream else forwarded) == orjson.dumps(sent)
    assert upstream.seen[0].header("x-session-affinity") == "pod-7"
    assert upstream.seen[0].header("x-client-request-id") == "r-1"


async def test_c17_a_library_behind_parts_keeps_them_and_their_marks(start: Start, upstream: Upstream) -> None:
    """Where L2 joins system parts, the client's parts and marks stand before it unchanged, and no mark too many."""
    strata = await start(promotion="eager")
    lead = {"role": "system", "content": PARTS}
    await say(strata, upstream, "s", lead, asked("Sum it up.", "log.md"))
    await say(strata, upstream, "s", lead, user("Sum it up."), DONE, user("More?"))
    forwarded = upstream.seen[1].json["messages"]
    assert forwarded[0]["content"][:2] == PARTS
    assert "log.md report 3" in forwarded[0]["content"][2]["text"]
    assert upstream.bodies[1].count(b"cache_control") == 1
    assert orjson.dumps(PARTS)[:-1] in upstream.bodies[1]


DEVELOPER = {"role": "developer", "content": [{"type": "text", "text": "Answer in Welsh."}]}


async def test_c25_a_developer_prompt_of_parts_holds_the_library(start: Start, upstream: Upstream) -> None:
    """A developer message of parts stays one, first and in front of the library, and equal from turn to turn."""
    strata = await start(promotion="eager")
    await say(strata, upstream, "s", DEVELOPER, asked("Sum it up.", "log.md"))
    history: list[object] = [DEVELOPER, user("Sum it up."), DONE]
    firsts = []
    for turn in range(3):
        await say(strata, upstream, "s", *history, user(f"More {turn}?"))
        firsts.append(upstream.seen[-1].json["messages"][0])
        history += [user(f"More {turn}?"), DONE]
    assert firsts[0] == firsts[1] == firsts[2]
    assert firsts[0]["role"] == "developer"
    assert firsts[0]["content"][0] == DEVELOPER["content"][0]
    assert "log.md report 3" in firsts[0]["content"][1]["text"]


@PROMOTIONS
async def test_c59_a_retry_gives_the_same_bytes(start: Start, upstream: Upstream, promotion: str) -> None:
    """A turn that failed and is sent again is forwarded with the very same bytes, its context in it once."""
    strata = await start(promotion=promotion)
    await say(strata, upstream, "s", LEAD, asked("Sum it up.", "log.md"))
    await say(strata, upstream, "s", LEAD, user("Sum it up."), DONE, asked("The crew?", "crew.md"))
    third = [LEAD, user("Sum it up."), DONE, user("The crew?"), DONE, asked("The pier?", "pier.md", "log.md")]

    async def broken(_: Seen, wire: Wire) -> None:
        await wire.whole(b'{"error":{"message":"no"}}', status=500)

    upstream.answer = broken
    failed = await say(strata, upstream, "s", *third)
    upstream.answer = chat_answer
    again = await say(strata, upstream, "s", *third)
    regenerated = await say(strata, upstream, "s", *third)
    assert failed == again == regenerated
    for name in (b"log.md report 3", b"crew.md report 3", b"pier.md report 3"):
        assert again.count(name) == 1


@PROMOTIONS
async def test_c59_an_edit_rewinds_to_the_clients_history(start: Start, upstream: Upstream, promotion: str) -> None:
    """An edited second turn knows nothing of the branch it leaves, and keeps what came before the fork, once."""
    strata = await start(promotion=promotion)
    await say(strata, upstream, "s", LEAD, asked("Sum it up.", "log.md"))
    await say(strata, upstream, "s", LEAD, user("Sum it up."), DONE, asked("The crew?", "crew.md"))
    await say(strata, upstream, "s", LEAD, user("Sum it up."), DONE, user("The crew?"), DONE, asked("Why?", "pier.md"))
    edited = await say(strata, upstream, "s", LEAD, user("Sum it up."), DONE, asked("The boats?", "boats.md"))
    assert edited.count(b"log.md report 3") == 1
    assert edited.count(b"boats.md report 3") == 1
    assert b"crew.md" not in edited
    assert b"pier.md" not in edited
    first, reply = (message["content"] for message in orjson.loads(edited)["messages"][1:3])
    assert (first, reply) == ("Sum it up." if promotion == "eager" else f"{note('log.md')}\n\nSum it up.", "Done.")
    then = await say(
        strata, upstream, "s", LEAD, user("Sum it up."), DONE, user("The boats?"), DONE, asked("Again?", "log.md")
    )
    for name in (b"log.md report 3", b"boats.md report 3"):
        assert then.count(name) == 1
    assert b"crew.md" not in then


@PROMOTIONS
@pytest.mark.parametrize("stream", [False, True])
async def test_c59_a_streamed_answer_belongs_to_its_turn_as_a_plain_one_does(
    start: Start, upstream: Upstream, stream: bool, promotion: str
) -> None:
    """Whether turns are streamed or not changes nothing in what the next ones are given."""
    strata = await start(promotion=promotion)
    named = {"x-strata-conversation": "s"}
    more = {"stream": True} if stream else {}
    await strata.post(chat(LEAD, asked("Sum it up.", "log.md"), **more), named)
    await strata.post(chat(LEAD, user("Sum it up."), DONE, asked("The crew?", "crew.md"), **more), named)
    history = [LEAD, user("Sum it up."), DONE, user("The crew?"), DONE]
    await strata.post(chat(*history, asked("And?", "log.md"), **more), named)
    for body, names in zip(upstream.bodies[1:], (["log.md"], ["log.md", "crew.md"]), strict=True):
        texts = [message["content"] for message in orjson.loads(body)["messages"]]
        held = texts[0] if promotion == "eager" else "\n".join(texts)
        places = [held.find(f"{name} report 3") for name in names]
        assert -1 not in places
        assert [held.count(f"{name} report 3") for name in names] == [1] * len(names)
        assert places == sorted(places)
    assert upstream.seen[2].json["messages"][-1]["content"].startswith("Context attached:\n- log.md\n")


@PROMOTIONS
async def test_c59_another_answer_forks(start: Start, upstream: Upstream, promotion: str) -> None:
    """A history that holds an answer which was never given draws nothing from what is stored."""
    strata = await start(promotion=promotion)
    await say(strata, upstream, "s", LEAD, asked("Sum it up.", "log.md"))
    sent = [LEAD, user("Sum it up."), assistant("I would rather not."), user("More?")]
    forwarded = await say(strata, upstream, "s", *sent)
    assert forwarded == orjson.dumps(chat(*sent))


@PROMOTIONS
async def test_c59_the_clients_messages_win(start: Start, upstream: Upstream, promotion: str) -> None:
    """Context that the client sends itself, in an old turn and another version, is the newest the model gets.

    Under deferred what was forwarded stays, and the new version is appended to the newest turn.
    """
    strata = await start(promotion=promotion)
    await say(strata, upstream, "s", LEAD, asked("Sum it up.", "log.md"))
    changed = note("log.md").replace("report 3 lists", "report 3 omits")
    sent = [LEAD, user(f"{changed}\n\nSum it up."), DONE, user("More?")]
    forwarded = orjson.loads(await say(strata, upstream, "s", *sent))["messages"]
    if promotion == "eager":
        assert forwarded == sent
    else:
        assert forwarded == [LEAD, asked("Sum it up.", "log.md"), DONE, user(f"{changed}\n\nMore?")]
    assert [message["role"] for message in forwarded] == ["system", "user", "assistant", "user"]


@PROMOTIONS
async def test_c59_conversations_of_two_keys_share_nothing(start: Start, upstream: Upstream, promotion: str) -> None:
    """The same conversation name under another key, or for another user, is another conversation."""
    strata = await start(promotion=promotion)
    await say(strata, upstream, "s", LEAD, asked("Sum it up.", "log.md"))
    sent = chat(LEAD, user("Sum it up."), DONE, user("More?"))
    named = {"x-strata-conversation": "s"}
    await strata.post(sent, {**named, "authorization": "Bearer sk-another"})
    await strata.post(sent, {**named, "x-openwebui-user-id": "u2"})
    await strata.post(sent, {"x-strata-conversation": "t"})
    assert upstream.bodies[1:] == [orjson.dumps(sent)] * 3


async def parallel(strata: Strata, requests: Sequence[tuple[object, ...]]) -> list[int]:
    """Send turns of one named conversation at once."""
    named = {"x-strata-conversation": "s"}
    answers = await asyncio.gather(*(strata.post(chat(*messages), named) for messages in requests))
    return [answer.status_code for answer in answers]


@PROMOTIONS
async def test_c58_two_branches_at_once_stay_apart(start: Start, upstream: Upstream, promotion: str) -> None:
    """Branches that are asked at the same time, each with a document, keep theirs and get no other's, once each."""

    async def slow(_: Seen, wire: Wire) -> None:
        await asyncio.sleep(0.05)
        await wire.whole(CHAT_ANSWER)

    upstream.answer = slow
    strata = await start(promotion=promotion)
    branches = [f"branch{number}" for number in range(8)]
    first = [(LEAD, asked(f"About {branch}?", f"{branch}.md")) for branch in branches]
    assert await parallel(strata, first) == [200] * 8
    second = [(LEAD, user(f"About {branch}?"), DONE, user("More?")) for branch in branches]
    assert await parallel(strata, second) == [200] * 8
    for body in upstream.bodies[8:]:
        own = next(branch for branch in branches if f"About {branch}?".encode() in body)
        assert body.count(f"{own}.md report 3".encode()) == 1
        assert [branch for branch in branches if f"{branch}.md".encode() in body] == [own]
