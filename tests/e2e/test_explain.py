"""What broke the prompt cache, and what would be done with a request: headers, records, metrics, explanations."""

from __future__ import annotations

import asyncio
import copy
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.e2e.kit import HANG, MODEL, Rig, chat_body, note, rigged
from tests.e2e.test_processes import clean_environment

RULES = "\n".join(f"Rule {number} stands for every customer and every order." for number in range(150))
Body = dict[str, Any]


def asked(clock: str, turns: int = 1, **more: Any) -> Body:
    """Return a chat whose system prompt says the time."""
    talk = [{"role": role, "content": f"{role} {turn}"} for turn in range(turns) for role in ("user", "assistant")][:-1]
    return chat_body(messages=[{"role": "system", "content": f"Time: {clock}\n{RULES}"}, *talk], **more)


@pytest.fixture
async def observed() -> AsyncIterator[Rig]:
    """A proxy that only watches, and shows what it saw."""
    async with rigged(None, MODE="observe", DEBUG="true") as rig:
        yield rig


async def uncached(rig: Rig) -> dict[str, int]:
    """Return the uncached tokens so far by cause, without the zeros."""
    causes = ("new", "cold_start", "expired", "changed", "below_minimum", "provider_miss", "unreported")
    found = {cause: int(await rig.proxy.total("strata_uncached_tokens_total", cause=cause)) for cause in causes}
    return {cause: tokens for cause, tokens in found.items() if tokens}


@pytest.mark.parametrize("name", ["", "c1"])
async def test_in_layers_a_break_is_named_by_the_clients_own_bytes(name: str) -> None:
    """A clock that Strata takes out of L1 was a clock; what Strata itself moves later is named as its own."""
    async with rigged(None, DEBUG="true") as rig:
        talk: list[Body] = []
        for turn in range(5):
            talk.append({"role": "user", "content": f"user {turn}"})
            system = {"role": "system", "content": f"Time: 10:0{turn}\n{RULES}"}
            headers = {"x-strata-conversation": name} if name else {}
            answer = await rig.proxy.post(chat_body(messages=[system, *talk]), headers=headers)
            talk.append(answer.json()["choices"][0]["message"])
            found = answer.headers.get("x-strata-divergence", "")
            if turn == 1:
                assert found.startswith("L1; kind=clock; message=0; character=10")
                told = await rig.proxy.http.get(
                    f"/strata/requests/{answer.headers['x-strata-request-id']}",
                    headers={"authorization": "Bearer key-one"},
                )
                assert "10:00" in told.json()["excerpts"]["was"]
                assert "10:01" in told.json()["excerpts"]["now"]
            elif turn > 1:
                assert ("kind=turn_context" in found) if not name else not found


@pytest.mark.parametrize("stream", [False, True])
async def test_a_clients_own_break_is_named_before_a_byte_is_changed(observed: Rig, stream: bool) -> None:
    """In the receipt of every answer, in the record, in the metrics, in the log; each uncached token has one cause."""
    first = await observed.proxy.post(asked("10:01", stream=stream))
    assert "x-strata-divergence" not in first.headers
    second = await observed.proxy.post(asked("10:02", 2, stream=stream))
    assert second.headers["x-strata-divergence"] == "L1; kind=clock; message=0; character=10"
    assert second.headers["x-strata-predicted-tokens"] == "0"
    await observed.proxy.settled(2)
    assert await observed.proxy.total("strata_cache_breaks_total", layer="L1", kind="clock") == 1
    causes = await uncached(observed)
    charges = [entry.charge for entry in observed.entries if entry.charge]
    assert sum(causes.values()) == sum(charge.uncached_tokens for charge in charges)
    assert causes["cold_start"] == charges[0].prompt_tokens
    assert 1_400 < causes["changed"] < charges[1].prompt_tokens
    told = (
        await observed.proxy.http.get(
            f"/strata/requests/{second.headers['x-strata-request-id']}", headers={"authorization": "Bearer key-one"}
        )
    ).json()
    assert told["divergence"] | {"shared_tokens": 0} == {
        "layer": "L1",
        "kind": "clock",
        "message": 0,
        "character": 10,
        "shared_tokens": 0,
    }
    assert told["causes"]["changed"] == causes["changed"]
    assert told["excerpts"]["was"].startswith("Time: 10:01")
    assert told["excerpts"]["now"].startswith("Time: 10:02")
    assert told["input_tokens"] == charges[1].prompt_tokens


async def test_a_record_is_shown_to_whom_it_belongs(rig: Rig) -> None:
    """To no other key; with no excerpt unless debug is on."""
    answer = await rig.proxy.post(asked("10:01"))
    path = f"/strata/requests/{answer.headers['x-strata-request-id']}"
    await rig.proxy.settled(1)
    own = await rig.proxy.http.get(path, headers={"authorization": "Bearer key-one"})
    assert own.status_code == 200
    assert own.json()["outcome"] == "ok"
    assert "owner" not in own.text
    assert "Rule" not in own.text
    for headers in ({"authorization": "Bearer key-two"}, {}):
        assert (await rig.proxy.http.get(path, headers=headers)).status_code == 404
    assert (await rig.proxy.http.get("/strata/requests/none")).status_code == 404


async def test_the_admin_may_see_every_record() -> None:
    """With the admin token."""
    async with rigged(None, ADMIN_TOKEN="t-1") as rig:
        answer = await rig.proxy.post(asked("10:01"))
        await asyncio.sleep(0.05)
        path = f"/strata/requests/{answer.headers['x-strata-request-id']}"
        assert (await rig.proxy.http.get(path, headers={"authorization": "Bearer t-1"})).status_code == 200


async def test_side_requests_and_other_chats_are_no_breaks(rig: Rig) -> None:
    """Nor forks, retries, growth and other conversations that begin alike."""
    talk = asked("10:01", 1)
    named = {"x-strata-conversation": "c1"}
    for body in (talk, talk, asked("10:01", 2), asked("10:01", 3), talk, chat_body("Make a title."), asked("10:01", 3)):
        answer = await rig.proxy.post(body, headers=named)
        assert "x-strata-divergence" not in answer.headers
    for number in range(3):
        answer = await rig.proxy.post(chat_body(f"Hello {number}"))
        assert "x-strata-divergence" not in answer.headers


@pytest.mark.parametrize("named", [{}, {"x-strata-conversation": "c1"}])
async def test_an_edited_history_is_found(observed: Rig, named: dict[str, str]) -> None:
    """However early the edit was."""
    talk = asked("10:01", 6)
    await observed.proxy.post(talk, headers=named)
    edited = copy.deepcopy(talk)
    edited["messages"][2]["content"] = "I never said that."
    edited["messages"] += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    answer = await observed.proxy.post(edited, headers=named)
    assert answer.headers["x-strata-divergence"].startswith("L4; kind=history_edited; message=2")


async def test_a_warning_is_one_a_conversation_and_kind(capfd: pytest.CaptureFixture[str]) -> None:
    """With the request's id, and no content."""
    async with rigged(None, MODE="observe") as observed:
        for minute in range(5):
            await observed.proxy.post(asked(f"10:0{minute}", minute + 1))
    lines = [line for line in capfd.readouterr().err.splitlines() if "prompt_cache_broken" in line]
    assert len(lines) == 1
    told = orjson.loads(lines[0])
    assert (told["layer"], told["kind"], told["level"]) == ("L1", "clock", "warning")
    assert told["request_id"]
    assert "10:0" not in lines[0]


async def test_explain_tells_the_plan_and_forwards_nothing(rig: Rig) -> None:
    """Layers, decisions, prediction, the very bytes; and it leaves no trace."""
    page = note("a.md", "The plan holds many words. ")
    named = {"x-strata-conversation": "c1", "authorization": "Bearer key-one"}
    first = chat_body(f"{page}\nWhat does it say?")
    answer = (await rig.proxy.post(first, headers=named)).json()["choices"][0]["message"]
    second = chat_body(messages=[*first["messages"], answer, {"role": "user", "content": f"{page}\nAnd now?"}])  # type: ignore[misc]
    before = len(rig.entries)
    told = [(await rig.proxy.post(second, headers=named, path="/strata/explain")).json() for _ in range(2)]
    assert told[0] == told[1]
    assert len(rig.entries) == before
    assert any(decision.startswith("a.md (note_context) stands earlier") for decision in told[0]["decisions"])
    assert [each["what"] for each in told[0]["messages"]] == ["as sent", "as sent", "changed"]
    assert sum(layer["tokens"] for layer in told[0]["layers"]) == told[0]["total_tokens"]
    made = await rig.proxy.post(second, headers=named)
    assert rig.last.body.decode() == told[0]["forwarded"]
    await rig.proxy.settled(2)
    path = f"/strata/requests/{made.headers['x-strata-request-id']}"
    receipt = (await rig.proxy.http.get(path, headers={"authorization": "Bearer key-one"})).json()
    assert told[0]["prediction"]["as_sent_tokens"] == receipt["as_sent_input_tokens"]
    assert await rig.proxy.total("strata_requests_total") == 2


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"model": "m", "messages": [], "messages": []}', 200, "bypass: duplicate_key"),
        (b"{", 400, "not valid JSON"),
        (b'{"messages": [{"role": "user", "content": "x"}], "strata": {"x": 1}}', 400, "strata"),
    ],
)
async def test_explain_of_what_cannot_be_read(rig: Rig, body: bytes, status: int, said: str) -> None:
    """The same errors as the chat route, and why nothing would be done."""
    answer = await rig.proxy.post(body, path="/strata/explain")
    assert answer.status_code == status
    assert said in answer.text


async def command(*arguments: str, stdin: bytes = b"", **settings: str) -> tuple[int, str, str]:
    """Run `strata` with an input."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", *arguments, env=clean_environment(**settings), cwd=Path(__file__).parents[2],
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(2 * HANG):
        out, err = await process.communicate(stdin)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("running", [False, True])
async def test_the_command_shows_it_to_people(rig: Rig, tmp_path: Path, running: bool) -> None:
    """Of a running proxy, or in this process with the settings in force."""
    page = note("a.md", "The plan holds many words. ")
    file = tmp_path / "request.json"
    file.write_bytes(orjson.dumps(chat_body(messages=[
        {"role": "user", "content": f"{page}\nWhat?"}, {"role": "assistant", "content": "That."},
        {"role": "user", "content": f"{page}\nAnd now?"}])))  # fmt: skip
    where = ("--url", rig.proxy.base_url) if running else ()
    status, out, err = await command("explain", str(file), "--header", "authorization: Bearer key-one", *where)
    assert (status, err) == (0, "")
    assert MODEL in out
    assert "anonymous" in out
    assert "a.md (note_context) stands earlier: a line refers to it" in out
    assert "changed" in out
    status, out, _ = await command("explain", "-", "--json", *where, stdin=file.read_bytes())
    assert orjson.loads(out)["object"] == "explanation"


async def test_the_command_says_why_it_cannot() -> None:
    """In one line, with a status."""
    status, _, err = await command("explain", "-", stdin=b"{")
    assert status == 1
    assert "not valid JSON" in err
    status, _, err = await command("explain", "-", "--url", "http://127.0.0.1:1", stdin=b"{}")
    assert status == 1
    assert "http://127.0.0.1:1/strata/explain cannot be asked" in err
    assert os.name
    for header in ("x-session-id", ": c1"):
        status, _, err = await command("explain", "-", "--header", header, stdin=b"{}")
        assert (status, f"{header!r} is not 'NAME: VALUE'" in err) == (2, True)
