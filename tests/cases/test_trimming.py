"""Field failures of kind B: trimming that breaks what was valid."""

import orjson
import pytest

from proxy.simulator.app import Options
from proxy.simulator.validity import check_chat
from tests.cases.conftest import (
    Start,
    StartProvider,
    Upstream,
    assistant,
    call,
    chat,
    note,
    provider_tokens,
    result,
    roles,
    system,
    untold,
    user,
    words,
)

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}},
}


def long_talk(turns: int, tokens: int = 180) -> list[dict[str, object]]:
    """Return whole turns of question and answer."""
    return [
        message
        for turn in range(turns)
        for message in (user(f"Question {turn}: {words(tokens, f'q{turn}')}"), assistant(f"Answer {turn}: it holds."))
    ]


@pytest.mark.parametrize("budget", [100_000, 1_000])
async def test_c20_results_at_the_tail_stay_under_budget(start: Start, upstream: Upstream, budget: int) -> None:
    """A conversation that ends with a tool result and fits is forwarded whole, the result last."""
    strata = await start(budget_tokens=budget, output_reserve_tokens=200)
    sent = chat(
        system("You keep a tide table. " + words(150)),
        user("When is high tide?"),
        {"role": "assistant", "content": None, "tool_calls": [call("c1")]},
        result("c1", "High at 14:10, 4.3 m. " + words(200)),
        tools=[TOOL],
    )
    answer = await strata.post(sent)
    assert answer.status_code == 200
    assert "x-strata-dropped-turns" not in answer.headers
    assert upstream.bodies == [orjson.dumps(sent)]
    assert roles(upstream.bodies[0])[-1] == "tool"


async def test_c20_the_last_exchange_stays_over_budget(start: Start, upstream: Upstream) -> None:
    """Over budget the old turns go; the newest question, its call and the result at the tail stay whole."""
    strata = await start(budget_tokens=2_000, output_reserve_tokens=200)
    tail = [
        user("When is high tide?"),
        {"role": "assistant", "content": None, "tool_calls": [call("c1"), call("c2")]},
        result("c1", "High at 14:10. " + words(300)),
        result("c2", "Low at 20:25."),
    ]
    answer = await strata.post(chat(system("You keep a tide table."), *long_talk(12), *tail, tools=[TOOL]))
    assert answer.status_code == 200
    assert int(answer.headers["x-strata-dropped-turns"]) > 0
    assert upstream.seen[0].json["messages"][-4:] == tail
    assert provider_tokens(upstream.bodies[0]) <= 1_800


@pytest.mark.parametrize("turns", range(8, 20))
async def test_c23_the_cut_is_at_a_user_turn(start: Start, upstream: Upstream, turns: int) -> None:
    """Wherever the grid cuts, the first message kept after L1 is the user's, and roles alternate strictly."""
    strata = await start(budget_tokens=1_500, output_reserve_tokens=200)
    messages = [system("Be brief."), *long_talk(turns, 150), user("And now?")]
    answer = await strata.post(chat(*messages))
    kept = roles(upstream.bodies[0])
    assert int(answer.headers["x-strata-dropped-turns"]) > 0
    assert kept[0] == "system"
    assert kept[1::2] == ["user"] * len(kept[1::2])
    assert kept[2::2] == ["assistant"] * len(kept[2::2])
    assert untold(upstream.seen[0].json["messages"][1:]) == messages[-len(kept) + 1 :]


@pytest.mark.parametrize("leading", [[system("Be brief.")], []], ids=["system", "no-system"])
async def test_c23_library_and_context_join_a_neighbour(
    start: Start, upstream: Upstream, leading: list[dict[str, object]]
) -> None:
    """L2 (also of web pages) and L3 join the system or a user message: never two user messages in a row."""
    strata = await start()
    web = f"<url_content>\n<url>https://pier.test/tides</url>\n{words(120, 'pier')}\n</url_content>"
    named = {"x-strata-conversation": "c23"}
    first = "What does the pier say?"
    await strata.post(chat(*leading, user(f"{web}\n\n{note('log.md')}\n\n{first}")), named)
    history = [*leading, user(first), assistant("Done.")]
    context = [{"id": "crew.md", "type": "note", "content": words(90, "crew")}]
    answer = await strata.post(chat(*history, user("Who is aboard?"), strata={"context": context}), named)
    assert answer.status_code == 200
    forwarded = upstream.seen[1].json["messages"]
    assert [message["role"] for message in forwarded] == [*(["system"] if leading else []), "user", "assistant", "user"]
    assert "pier report 3" in forwarded[len(leading)]["content"]
    assert "pier report" not in "".join(message["content"] for message in forwarded[: len(leading)])
    assert forwarded[-1]["content"].endswith("Who is aboard?")
    assert "crew report 3" in forwarded[-1]["content"]
    await strata.post(chat(*history, user("Who is aboard?"), strata={"context": context}), named)
    assert upstream.bodies[2] == upstream.bodies[1]


async def test_c24_layers_pass_an_upstream_of_one_leading_system_message(start: Start, provide: StartProvider) -> None:
    """Where no system message may stand behind the first, L1 with L2 and L3 still pass, and every step is valid."""
    provider = await provide(Options(strict=True))
    strata = await start(upstream_url=provider.url, promotion="eager")
    named = {"x-strata-conversation": "c24"}
    first = await strata.post(chat(system("Be brief."), user(f"{note('log.md')}\n\nSum it up.")), named)
    reply = first.json()["choices"][0]["message"]["content"]
    history = [system("Be brief."), user("Sum it up."), assistant(reply)]
    context = {"context": [{"id": "crew.md", "content": words(90, "crew")}]}
    second = await strata.post(chat(*history, user("Who is aboard?"), strata=context), named)
    assert (first.status_code, second.status_code) == (200, 200)
    forwarded = orjson.loads(provider.bodies[-1])
    check_chat(forwarded, strict=True)
    assert [message["role"] for message in forwarded["messages"]] == ["system", "user", "assistant", "user"]
    assert forwarded["messages"][0]["content"].startswith("Be brief.\n\n")
    assert "log.md report 3" in forwarded["messages"][0]["content"]


@pytest.mark.parametrize("stream", [False, True])
async def test_c24_a_system_note_in_mid_conversation_keeps_its_place(
    start: Start, upstream: Upstream, stream: bool
) -> None:
    """A system or developer message in mid-conversation is forwarded where it stands, and is no part of L1."""
    strata = await start(mode="layered", budget_tokens=50_000)
    middle = [system("The pier is closed today."), {"role": "developer", "content": "Use metres."}]
    sent = chat(system("Be brief."), user("Hello"), assistant("Hello."), *middle, user("Now?"), stream=stream)
    answer = await strata.post(sent)
    assert upstream.seen[0].json["messages"] == sent["messages"]
    plain = await strata.post(chat(system("Be brief."), user("Hello"), stream=stream))

    def first_layer(headers: str) -> str:
        return next(part for part in headers.split() if part.startswith("L1="))

    assert first_layer(answer.headers["x-strata-layers"]) == first_layer(plain.headers["x-strata-layers"])


async def test_c24_two_leading_system_messages_and_a_library_stay_valid(start: Start, upstream: Upstream) -> None:
    """With L1 in two leading system messages L2 joins the last of them; no system message is added."""
    strata = await start(promotion="eager")
    named = {"x-strata-conversation": "c24b"}
    leading = [system("Be brief."), system("Use metres.")]
    await strata.post(chat(*leading, user(f"{note('log.md')}\n\nSum it up.")), named)
    await strata.post(chat(*leading, user("Sum it up."), assistant("Done."), user("More?")), named)
    assert roles(upstream.bodies[1]) == ["system", "system", "user", "assistant", "user"]
    assert upstream.seen[1].json["messages"][0] == leading[0]
    assert "log.md report 3" in upstream.seen[1].json["messages"][1]["content"]


DEVELOPER = {"role": "developer", "content": [{"type": "text", "text": "Answer in Welsh."}]}


async def test_c25_a_developer_message_of_parts_survives_trimming(start: Start, upstream: Upstream) -> None:
    """A developer message made of parts is L1: kept first, in its role and form, while history is cut."""
    strata = await start(budget_tokens=1_500, output_reserve_tokens=200)
    answer = await strata.post(chat(DEVELOPER, *long_talk(12), user("And now?")))
    assert int(answer.headers["x-strata-dropped-turns"]) > 0
    assert "L1=" in answer.headers["x-strata-layers"]
    assert upstream.seen[0].json["messages"][0] == DEVELOPER
    assert orjson.dumps(DEVELOPER) in upstream.bodies[0]


async def test_c25_a_short_developer_conversation_is_untouched(start: Start, upstream: Upstream) -> None:
    """A developer message of parts and a greeting are forwarded byte for byte."""
    strata = await start()
    sent = chat(DEVELOPER, user("hi"))
    await strata.post(sent)
    assert upstream.bodies == [orjson.dumps(sent)]


EMPTIES = [
    {"role": "assistant", "content": None, "tool_calls": [call("c1")]},
    result("c1", "14:10"),
    {"role": "assistant", "tool_calls": [call("c2")]},
    result("c2", ""),
    {"role": "assistant", "content": ""},
]


@pytest.mark.parametrize("named", [{}, {"x-strata-conversation": "c26"}], ids=["anonymous", "named"])
async def test_c26_null_absent_and_empty_content_stay_what_they_are(
    start: Start, upstream: Upstream, named: dict[str, str]
) -> None:
    """null stays null, absent absent and "" empty; nothing is dropped and nothing refused here."""
    strata = await start()
    sent = chat(user("When is high tide?"), *EMPTIES, user("Thanks"))
    answer = await strata.post(sent, named)
    assert answer.status_code == 200
    assert upstream.bodies == [orjson.dumps(sent)]


async def test_c26_empty_contents_stay_when_old_turns_go(start: Start, upstream: Upstream) -> None:
    """Cutting history leaves the kept assistant messages without content as they came."""
    strata = await start(budget_tokens=1_500, output_reserve_tokens=200)
    await strata.post(chat(*long_talk(12), user("When is high tide?"), *EMPTIES, user("Thanks")))
    assert upstream.seen[0].json["messages"][-7:] == [user("When is high tide?"), *EMPTIES, user("Thanks")]


async def test_c26_odd_contents_are_judged_by_the_upstream(start: Start, upstream: Upstream) -> None:
    """A message whose content has a form nobody documented is forwarded, not refused here."""
    strata = await start(budget_tokens=100_000)
    sent = chat({"role": "assistant", "content": {"text": "x"}}, {"role": "user", "content": 7}, {"content": "y"})
    answer = await strata.post(sent)
    assert answer.status_code == 200
    assert upstream.bodies == [orjson.dumps(sent)]


PREFILL = assistant('{"rivers":[')


@pytest.mark.parametrize("budget", [100_000, 1_500])
async def test_c27_a_begun_answer_stays_last(start: Start, upstream: Upstream, budget: int) -> None:
    """A partial assistant message stays last, as it came; context is put before the user's words."""
    strata = await start(budget_tokens=budget, output_reserve_tokens=200)
    context = {"context": [{"id": "atlas.md", "content": words(90, "atlas")}]}
    question = user("List three rivers as JSON.")
    await strata.post(chat(system("Be brief."), *long_talk(12), question, PREFILL, strata=context))
    forwarded = upstream.seen[0].json["messages"]
    assert forwarded[-1] == PREFILL
    assert orjson.dumps(PREFILL) in upstream.bodies[0]
    assert forwarded[-2]["role"] == "user"
    assert forwarded[-2]["content"].endswith("\n\nList three rivers as JSON.")
    assert "atlas report 3" in forwarded[-2]["content"]


async def test_c27_a_begun_answer_alone_is_untouched(start: Start, upstream: Upstream) -> None:
    """System, question and begun answer are forwarded byte for byte."""
    strata = await start()
    sent = chat(system("Be brief."), user("List three rivers as JSON."), PREFILL)
    await strata.post(sent)
    assert upstream.bodies == [orjson.dumps(sent)]
