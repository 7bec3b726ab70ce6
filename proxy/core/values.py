"""Volatile lines of L1, on the wire: a marker in their place, their current values before the user's words or last.

    system  …Be brief.\\n[current value 1: in the newest <current_values key="9f3a61d0">]\\nCite sources.…
    user    <current_values key="9f3a61d0">\\nIt is 10:15.\\n</current_values>\\n\\nWhy?

Of several each has a head, `[9f3a61d0:1]`. The key is the tenant's own: a user who writes such a frame cannot know it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from proxy.core import render
from proxy.core.draft import AS_SENT, L1, Change, Replacement
from proxy.core.lines import Line
from proxy.core.message import meaning
from proxy.core.request import Request
from proxy.core.template import Formed

_FRAME = "current_values"
_CLOSE, _CLOSE_INSIDE = f"</{_FRAME}", f"<\\/{_FRAME}"
_NOTHING = "(none)"


@dataclass(frozen=True, slots=True)
class Current:
    """L1 without its volatile lines, and what each slot holds in this request."""

    l1: L1
    slots: tuple[str, ...]
    key: str

    def told(self, standing: Mapping[int, str]) -> tuple[tuple[int, str], ...]:
        """Return what is to be told where some values stand already."""
        return tuple((slot, text) for slot, text in enumerate(self.slots) if standing.get(slot) != text)

    def frame(self, told: Iterable[tuple[int, str]]) -> str:
        """Render values; a value cannot close their frame, nor speak for another. One that is alone has no head."""
        heads = f"[{self.key}:", f"[\\{self.key}:"
        parts = [
            (f"{heads[0]}{slot + 1}]\n" if len(self.slots) > 1 else "")
            + (text.replace(_CLOSE, _CLOSE_INSIDE).replace(*heads) or _NOTHING)
            for slot, text in told
        ]
        return "\n".join([f'<{_FRAME} key="{self.key}">', *parts, f"{_CLOSE}>"]) if parts else ""


def current(request: Request, leading: int, formed: Formed, key: bytes) -> Current:
    """Take the volatile lines out of L1, and what belongs to one lineage behind the rest."""
    name = hashlib.blake2b(_FRAME.encode(), digest_size=4, key=key).hexdigest()
    if not formed.form.slots and not formed.form.behind:
        return Current(AS_SENT, (), name)
    slots: dict[int, list[str]] = {at: [] for at in formed.form.slots}
    behind: list[str] = []
    replaced: dict[int, dict[tuple[int, int], list[Replacement]]] = {}
    number = {at: place + 1 for place, at in enumerate(formed.form.slots)}
    for run in _runs(formed):
        value = run.value
        replacements = replaced.setdefault(run.head.index, {}).setdefault(run.head.text.where, [])
        if run.role == "behind":
            behind.append(value)
            replacements.append(_cut(run))
            continue
        marker = f'[current value {number[run.slot]}: in the newest <{_FRAME} key="{name}">]'
        slots[run.slot] += [value] if value else []
        replacements.append(Replacement(*_where(run), _spaced(marker, run)))
    of_messages = {
        index: {where: tuple(replacements) for where, replacements in texts.items()}
        for index, texts in replaced.items()
    }
    last = "\n".join(behind)
    digest = hashlib.blake2b(last.encode("utf-8", "surrogatepass"), digest_size=16)
    for index in range(leading):
        if index in of_messages:
            digest.update(meaning(render.message(request.raw(index), Change(replaced=of_messages[index]))))
        else:
            digest.update(request.messages[index].meaning)
    l1 = L1(replaced=of_messages, behind=last, digest=digest.digest())
    return Current(l1, tuple("\n".join(texts) for texts in slots.values()), name)


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring lines of one part in one text; none, where a slot is empty: then it stands in front of `head`."""

    role: str
    slot: int
    lines: Sequence[Line]
    head: Line
    before: Line | None
    after: Line | None

    @property
    def value(self) -> str:
        """The lines as they stand, what lies between them included."""
        return self.head.text.value[self.lines[0].start : self.lines[-1].end] if self.lines else ""


def _runs(formed: Formed) -> Iterator[_Run]:
    lines, roles, empty = formed.roles.lines, formed.roles.each, formed.roles.empty
    stable = at = 0
    while at < len(lines):
        end = at + 1
        while end < len(lines) and _goes_on(formed, at, end):
            end += 1
        before = lines[at - 1] if at and lines[at - 1].beside(lines[at]) else None
        after = lines[end] if end < len(lines) and lines[end].beside(lines[at]) else None
        if at in empty and roles[at] != "volatile" and not (at and roles[at - 1] == "volatile"):
            yield _Run("volatile", stable, (), lines[at], before, lines[at])
        if roles[at] != "kept":
            yield _Run(roles[at], stable, lines[at:end], lines[at], before, after)
        stable += 0 if roles[at] == "volatile" else end - at
        at = end
    if at in empty and lines and roles[-1] != "volatile":
        yield _Run("volatile", stable, (), lines[-1], lines[-1], None)


def _goes_on(formed: Formed, at: int, end: int) -> bool:
    lines, roles = formed.roles.lines, formed.roles.each
    same = roles[end] == roles[at] and lines[end].beside(lines[at])
    return same and (roles[at] == "volatile" or end not in formed.roles.empty)


def _where(run: _Run) -> tuple[int, int]:
    if run.lines:
        return run.lines[0].start, run.lines[-1].end
    at = run.after.start if run.after else run.head.end
    return at, at


def _spaced(marker: str, run: _Run) -> str:
    """Give the marker of an empty slot a line of its own, as it has where something stands there."""
    if run.lines:
        return marker
    if run.after is None:
        return f"\n{marker}"
    return marker + (run.head.text.value[run.before.end : run.after.start] if run.before else "\n")


def _cut(run: _Run) -> Replacement:
    """Leave no gap where lines have gone."""
    if run.after is not None:
        return Replacement(run.lines[0].start, run.after.start, "")
    return Replacement(run.before.end if run.before else run.lines[0].start, run.lines[-1].end, "")
