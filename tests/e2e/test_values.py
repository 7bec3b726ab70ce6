"""Current values on the wire: clocks in the system prompt, several users, agents in a loop."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import redis

from tests.e2e.kit import Rig, chat_body, content, note, rigged

POLICY = "\n".join(f"Rule {number} stands for every customer and every order." for number in
                   ("one", "two", "three", "four", "five", "six", "seven", "eight"))  # fmt: skip
OK = {"role": "assistant", "content": "ok"}


def system(minute: int, name: str = "Ada") -> dict[str, Any]:
    text = f"The user is {name}.\nTime: 10:{minute:02}\n{POLICY}\n{POLICY}"
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(rig: Rig, *messages: dict[str, Any], headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Send messages; return them as they arrived."""
    answer = await rig.proxy.post(chat_body(messages=list(messages)), headers=headers or {})
    assert answer.status_code == 200
    found: list[dict[str, Any]] = orjson.loads(rig.last.body)["messages"]
    return found


async def talk(
    rig: Rig, *messages: dict[str, Any], stream: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Send messages; return them as they arrived, and the answer."""
    answer = await rig.proxy.post(chat_body(messages=list(messages), stream=stream))
    whole = content(answer.content) if stream else answer.json()["choices"][0]["message"]["content"]
    return orjson.loads(rig.last.body)["messages"], {"role": "assistant", "content": whole}


async def test_a_clock_leaves_l1_and_its_value_arrives() -> None:
    """One break when it is learned; the receipt says how many places are volatile."""
    async with rigged() as rig:
        first = await ask(rig, system(1), user("a"))
        second = await ask(rig, system(2), user("a"), OK, user("b"))
        third = await ask(rig, system(3), user("a"), OK, user("b"), OK, user("c"))
        sent = chat_body(messages=[system(4), user("a"), OK, user("b"), OK, user("c"), OK, user("d")])
        answer = await rig.proxy.post(sent)
    assert first[0] == system(1)
    assert second[0] == third[0] != first[0]
    assert "10:02" not in second[0]["content"]
    assert "\nTime: 10:03\n" in third[-1]["content"]
    assert answer.headers["x-strata-current-values"] == "1"


async def test_a_named_conversation_of_which_nothing_is_remembered_is_planned_as_one_without_a_name() -> None:
    """What is told of the clock stands where nothing has to be replayed, so that the history stays a prefix."""
    async with rigged(REMEMBER_CONTENT="false", SYSTEM_LAST="true") as rig:
        said, before = [user("a")], list[dict[str, Any]]()
        for turn in range(4):
            now = await ask(rig, system(turn), *said, headers={"x-strata-conversation": "c"})
            if turn > 1:
                assert now[: len(before)] == before
            before = now[:-1]
            said += [OK, user("more")]
        sent = chat_body(messages=[system(5), *said])
        answer = await rig.proxy.post(sent, headers={"x-strata-conversation": "c"})
    assert answer.headers["x-strata-conversation"] == "c"
    assert "x-strata-epoch" not in answer.headers


async def test_values_at_the_end_break_nothing_of_the_history() -> None:
    """What the receipt says of the next turn is Strata's own, and no edit of the client's."""
    async with rigged(None, SYSTEM_LAST="true") as rig:
        history: list[dict[str, Any]] = []
        for minute in range(1, 5):
            asked = [system(minute), *history, user(f"q{minute}")]
            answer = await rig.proxy.post(chat_body(messages=asked))
            history += [user(f"q{minute}"), answer.json()["choices"][0]["message"]]
    assert answer.headers["x-strata-divergence"] == "L3; kind=turn_context"


async def test_switched_off_nothing_moves() -> None:
    """The client's own bytes go upstream, break after break."""
    async with rigged(None, CURRENT_VALUES="false") as rig:
        for minute in range(3):
            asked = [system(minute), user("a"), *[OK, user("b")] * minute]
            assert await ask(rig, *asked) == asked


async def test_observed_nothing_moves() -> None:
    """Nor in `observe`."""
    async with rigged(None, MODE="observe") as rig:
        for minute in range(3):
            asked = [system(minute), user("a"), *[OK, user("b")] * minute]
            assert await ask(rig, *asked) == asked


async def test_two_tenants_learn_nothing_from_one_another() -> None:
    """What is volatile for one is text like any other for the next, and the frames' keys differ."""
    tenants = {"TENANTS__ACME__KEYS": "key-one", "TENANTS__OTHER__KEYS": "key-two"}
    one, two = ({"authorization": f"Bearer {key}"} for key in ("key-one", "key-two"))
    async with rigged(None, **tenants) as rig:
        await ask(rig, system(1), user("a"), headers=one)
        mine = await ask(rig, system(2), user("a"), OK, user("b"), headers=one)
        assert await ask(rig, system(3), user("hi"), headers=two) == [system(3), user("hi")]
        theirs = await ask(rig, system(4), user("hi"), OK, user("b"), headers=two)
    assert mine[0]["content"] != theirs[0]["content"]


async def test_two_users_share_what_comes_before_their_names() -> None:
    """From the third user on, whose first request is read from the cache but for the name."""
    async with rigged() as rig:
        for name in ("Ada", "Bob", "Cleo", "Dan"):
            sent = await ask(rig, system(1, name), user(f"I am {name}."))
    assert sent[0]["content"].endswith(f"{POLICY}\n\nThe user is Dan.")


@pytest.mark.parametrize("takes", [True, False])
async def test_an_agents_loop_where_a_last_system_message_is_taken_and_where_not(takes: bool) -> None:
    """Only where the operator says so does the prompt end in one."""
    async with rigged(None, SYSTEM_LAST=str(takes).lower()) as rig:
        function = {"name": "look", "arguments": "{}"}
        called = {"role": "assistant", "content": None,
                  "tool_calls": [{"id": "c", "type": "function", "function": function}]}  # fmt: skip
        loop = [called, {"role": "tool", "tool_call_id": "c", "content": "found"}]
        await ask(rig, system(1), user("a"))
        await ask(rig, system(2), user("a"), OK, user("b"))
        sent = await ask(rig, system(3), user("a"), OK, user("b"), *loop)
    assert (sent[-1]["role"] == "system") is takes
    assert ("10:03" in sent[-1]["content"]) is takes
    assert ("10:03" in sent[3]["content"]) is not takes


@pytest.mark.parametrize("stream", [False, True])
async def test_an_anonymous_client_that_strips_and_attaches_again(stream: bool) -> None:
    """What it attached stands where it stood; what it leaves out is not there; the next conversation has it in L2.

    Behind an answer that was never given nothing is put back.
    """
    attached = f"{note('a.md', 'The spec says many things. ')}\n\n{note('b.md', 'The api has endpoints. ')}"
    async with rigged() as rig:
        policy = {"role": "system", "content": POLICY}
        _, one = await talk(rig, policy, user(f"{attached}\n\nq0"), stream=stream)
        said = [policy, user("q0"), one]
        second, two = await talk(rig, *said, user(f"{attached}\n\nq1"), stream=stream)
        said += [user("q1"), two]
        third, three = await talk(rig, *said, user(f"{attached}\n\nq2"), stream=stream)
        said += [user("q2"), three]
        bare = await ask(rig, *said, user("q3"))
        regenerated = await ask(rig, policy, user("q0"), OK, user(f"{attached}\n\nq1"))
        other = await ask(rig, policy, user(f"{attached}\n\nelse"))
    assert second[:2] == [policy, user(f"{attached}\n\nq0")]
    assert third[:4] == second
    assert third[-1]["content"].endswith("Find them above in this conversation.\n\nq2")
    assert bare == [*said, user("q3")]
    assert regenerated[1] == user("q0")
    assert other[0]["content"].startswith(f"{POLICY}\n\n<context_library>")


async def test_a_plain_chat_asks_redis_once(redis_url: str) -> None:
    """What this process has forwarded itself it knows."""
    reads = []
    policy, history = {"role": "system", "content": POLICY}, list[dict[str, Any]]()
    async with rigged(None, REDIS_URL=redis_url, SECRET="plain") as rig:
        for turn in range(4):
            _, answer = await talk(rig, policy, *history, user(f"q{turn}"))
            history += [user(f"q{turn}"), answer]
            with redis.Redis.from_url(redis_url) as raw:
                reads.append(raw.info("commandstats").get("cmdstat_hkeys", {}).get("calls", 0))
    assert reads[1:] == [reads[1]] * 3


async def test_two_replicas_put_the_same_back(redis_url: str) -> None:
    """Whichever of them served the turn before."""
    attached = note("a.md", "The spec says many things. ")
    shared = {"REDIS_URL": redis_url, "SECRET": "s"}
    policy, before = {"role": "system", "content": POLICY}, list[dict[str, Any]]()
    async with rigged(None, **shared) as one, rigged(None, **shared) as two:
        history: list[dict[str, Any]] = []
        for turn in range(6):
            rig = (one, two)[turn % 2]
            sent, answer = await talk(rig, policy, *history, user(f"{attached}\n\nq{turn}"))
            assert sent[: len(before)] == before
            before = sent
            history += [user(f"q{turn}"), answer]
    assert str(before).count("The spec says") == str(note("a.md", "The spec says many things. ")).count("The spec says")


async def test_an_anonymous_library_switched_off() -> None:
    """Every turn goes as it came."""
    attached = note("a.md", "The spec says many things. ")
    async with rigged(None, ANONYMOUS_LIBRARY="false") as rig:
        policy = {"role": "system", "content": POLICY}
        await ask(rig, policy, user(f"{attached}\n\nq0"))
        asked = [policy, user("q0"), OK, user(f"{attached}\n\nq1")]
        assert await ask(rig, *asked) == asked


@pytest.mark.parametrize("more", [{"tools": [{"type": "function", "function": {"name": "a"}}]}, {"strata": {}}])
async def test_no_messages_are_the_upstreams_to_judge(more: dict[str, Any]) -> None:
    """Its own refusal comes back."""
    async with rigged() as rig:
        for headers in ({}, {"x-strata-conversation": "c"}):
            answer = await rig.proxy.post({**chat_body(messages=[]), **more}, headers=headers)
            assert answer.status_code == 400
            assert "messages" in answer.json()["error"]["message"]
