"""Realistic conversations as clients really send them: each request is made from what the client keeps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

_SUBJECTS = ("the migration", "each tenant", "the importer", "our gateway", "a retry", "the ledger", "the nightly job")
_VERBS = ("rewrites", "checks", "keeps", "must never lose", "reads back", "compares", "publishes")
_OBJECTS = (
    "its invoices",
    "the audit trail",
    "every open order",
    "a signed manifest",
    "the old schema",
    "two replicas",
)
_TAILS = (
    "before the window closes", "when the primary is away", "unless a reviewer objects", "within four minutes",
    "so that support can explain it", "and says why in the log", "without touching the archive",
)  # fmt: skip

Chat = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a person asks, and what the client attaches to it."""

    words: str
    attached: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One conversation. `strips` when the client takes attachments out of its history, as note-taking chats do.

    `ticks` when the client writes the time at the head of its system prompt, as many agents do. `conversation` is the
    id the client sends in a header; empty for the many clients that send none.
    """

    title: str
    system: str
    turns: tuple[Turn, ...]
    conversation: str = ""
    strips: bool = False
    ticks: bool = False


@dataclass(slots=True)
class Script:
    """A client in the middle of a scene: what it sends next, given what it was answered."""

    scene: Scene
    history: Chat = field(default_factory=list)

    def request(self, turn: Turn) -> Chat:
        """Return the messages of the next request."""
        asked = {"role": "user", "content": "\n\n".join([*turn.attached, turn.words])}
        clock = f"Current time: 2026-11-29 10:{len(self.history):02}\n" if self.scene.ticks else ""
        return [{"role": "system", "content": clock + self.scene.system}, *self.history, asked]

    def answered(self, turn: Turn, answer: str) -> None:
        """Keep a turn in the client's own history, with or without its attachments."""
        attached = () if self.scene.strips else turn.attached
        self.history += [
            {"role": "user", "content": "\n\n".join([*attached, turn.words])},
            {"role": "assistant", "content": answer},
        ]


def note(path: str, sentences: int) -> str:
    """Return an attached note, as an Obsidian copilot sends it."""
    return f"<note_context>\n<path>{path}</path>\n<content>\n{_prose(path, sentences)}\n</content>\n</note_context>"


def page(url: str, sentences: int) -> str:
    """Return an attached web page."""
    return f"<url_content>\n<url>{url}</url>\n<content>\n{_prose(url, sentences)}\n</content>\n</url_content>"


def document(name: str, sentences: int) -> str:
    """Return an attached document, as many chat apps send it."""
    return f'<document name="{name}">\n{_prose(name, sentences)}\n</document>'


def broken() -> Scene:
    """Return a conversation for breaking its prompt cache."""
    return Scene(
        title="a broken prompt cache",
        system="You answer questions about orders.\n\n" + _prose("orders", 80),
        conversation="demo-break",
        turns=tuple(
            Turn(words=words)
            for words in ("Where is my order?", "Can I still change it?", "And the address?", "When will it come?")
        ),
    )


def scenes() -> tuple[Scene, ...]:
    """Return the demo's conversations."""
    spec, api, plan = note("project-spec.md", 70), note("api-docs.md", 80), note("rollout/plan.md", 60)
    review, contract = page("https://wiki.example/review", 60), document("contract.pdf", 130)
    policy = "You work for the billing team. Answer briefly and cite the note you used.\n\n" + _prose("policy", 60)
    agent = "You are a release engineer. Use the tools; never guess a version.\n\n" + _prose("handbook", 110)
    return (
        Scene(
            title="notes chat (named, strips history)",
            system=policy,
            conversation="demo-notes",
            strips=True,
            turns=(
                Turn(words="Summarize this.", attached=(spec,)),
                Turn(words="What does the API say about it?", attached=(spec, api)),
                Turn(words="Explain that for a new colleague.", attached=(spec, api)),
                Turn(words="Which of the two is out of date?", attached=(spec, api)),
                Turn(words="Write the announcement.", attached=(spec, api)),
                Turn(words="Shorter, please.", attached=(spec, api)),
            ),
        ),
        Scene(
            title="attachments (sent every turn)",
            system=policy,
            turns=tuple(
                Turn(words=words, attached=(contract,))
                for words in (
                    "What are the notice periods?", "And for the supplier?", "List every date in it.",
                    "Who signs?", "What happens after a breach?", "Draft a one-line summary.",
                )
            ),
        ),
        Scene(
            title="research (named, web pages)",
            system=policy,
            conversation="demo-research",
            strips=True,
            turns=(
                Turn(words="What do reviewers say?", attached=(review,)),
                Turn(words="Compare it with our plan.", attached=(review, plan)),
                Turn(words="Where do they disagree?", attached=(review, plan)),
                Turn(words="Turn it into three bullet points.", attached=(review, plan)),
                Turn(words="One of them is wrong. Which?", attached=(review, plan)),
            ),
        ),
        Scene(
            title="clock agent (the time in its prompt)",
            system=agent,
            ticks=True,
            turns=tuple(
                Turn(words=words)
                for words in (
                    "Anything left open from yesterday?", "Page whoever is on call.", "What did they say?",
                    "Close it, then.", "Who has to know?", "Write to them.",
                )
            ),
        ),
        Scene(
            title="agent (append-only)",
            system=agent,
            turns=tuple(
                Turn(words=words)
                for words in (
                    "Which release is live?", "Is the hot fix in it?", "Roll it to the canary.",
                    "How is the error rate?", "Go on with the rest.", "Write the change log.",
                )
            ),
        ),
    )  # fmt: skip


def _prose(seed: str, sentences: int) -> str:
    """Return text that is the same on every run."""
    pick = random.Random(seed)  # noqa: S311 -- prose, not secrets
    told = (
        f"{pick.choice(_SUBJECTS)} {pick.choice(_VERBS)} {pick.choice(_OBJECTS)} {pick.choice(_TAILS)}"
        for _ in range(sentences)
    )
    return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in told)
