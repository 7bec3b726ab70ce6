"""Recipe → the message as it was, from the words the client sends there now and the items of this request.

One character stands in for each item: most are referred to when the prompt is arranged, and need no second copy.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import orjson

from proxy.core.body import Edit, elements, splice, split
from proxy.core.draft import Slot
from proxy.core.items import Block, Item
from proxy.core.message import Text, texts
from proxy.core.recipe import Here, Log, Piece, Recipe, Words
from proxy.core.render import offsets, part, quoted
from proxy.core.request import Request

_STAND_IN = "\ufffc"
_WORD = re.compile(r"\S+")


def slots(request: Request, log: Log) -> dict[int, Slot]:
    """Return messages with the items they once held, by index; what is nowhere in this request is left out.

    A message that holds other words than it did, or is of another form, stands as it came.
    """
    pieces = {piece for recipe in log.again.values() for pieces in recipe.texts for piece in pieces}
    spelled = _spelled(request, [here for piece, here in log.held.items() if piece in pieces])
    made = {index: _made(request, index, recipe, log.held, spelled) for index, recipe in log.again.items()}
    return {index: slot for index, slot in made.items() if slot is not None}


def _spelled(request: Request, wanted: Sequence[Here | Item]) -> dict[bytes, bytes]:
    """Return items as the client spells them, without quotes, by their content's digest; each text is read once."""
    found = {item.sha256: quoted(item.content) for item in wanted if isinstance(item, Item)}
    by_text: dict[tuple[int, int], list[Here]] = {}
    for here in wanted:
        if isinstance(here, Here):
            by_text.setdefault((here.index, here.text.start), []).append(here)
    for (index, start), held in by_text.items():
        text = request.raw(index)[start : held[0].text.end].decode()
        edges = offsets(text, [edge for here in held for edge in (here.start, here.end)])
        found |= {here.item.sha256: text[edges[here.start] : edges[here.end]].encode() for here in held}
    return found


def _made(
    request: Request, index: int, recipe: Recipe, held: Mapping[bytes, Here | Item], spelled: Mapping[bytes, bytes]
) -> Slot | None:
    raw = request.raw(index)
    form, found, media = texts(raw)
    if len(found) != 1 or media or (form == "string" and len(recipe.texts) > 1):
        return None
    start, end, value = found[0]
    words = [(word.start(), word.end()) for word in _WORD.finditer(value)]
    if len(words) != sum(each.many for pieces in recipe.texts for each in pieces if isinstance(each, Words)):
        return None
    made = [_pieced(pieces, held, value, words) for pieces in recipe.texts]
    at = recipe.worded
    edits = [Edit(start, end, orjson.dumps(made[at][0]))]
    if len(made) > 1:
        content = split(raw)["content"]
        ((first, last),) = elements(raw, content.value, content.end)
        edits.append(Edit(first, first, b"".join(part(text) + b"," for text, _ in made[:at] if text.strip())))
        edits.append(Edit(last, last, b"".join(b"," + part(text) for text, _ in made[at + 1 :] if text.strip())))
    raw = splice(raw, sorted(edits, key=lambda edit: edit.start))
    filled = [(text, blocks) for place, (text, blocks) in enumerate(made) if text.strip() or place == at]
    placed = zip(texts(raw)[1], filled, strict=True)
    held_texts = tuple(Text(first, last, text, blocks) for (first, last, _), (text, blocks) in placed)
    return Slot(dataclasses.replace(request.messages[index], texts=held_texts), raw, spelled=spelled)


def _pieced(
    pieces: Sequence[Piece], held: Mapping[bytes, Here | Item], value: str, words: Sequence[tuple[int, int]]
) -> tuple[str, tuple[Block, ...]]:
    """Put a text together again; the space behind a missing item goes with it, unless it ends what stands in front."""
    made, blocks = list[str](), list[Block]()
    length, at, gone = 0, 0, False
    for piece in pieces:
        if isinstance(piece, bytes):
            gone = piece not in held
            if not gone:
                here = held[piece]
                item = here.item if isinstance(here, Here) else here
                blocks.append(Block(length, length + len(_STAND_IN), item))
                made.append(_STAND_IN)
                length += len(_STAND_IN)
            continue
        said = value[words[at][0] : words[at + piece.many - 1][1]] if piece.many else ""
        at += piece.many
        beside = made and made[-1] and not made[-1][-1].isspace()
        between = (piece.before if beside or not gone else "") + said + piece.behind
        gone = gone and not piece.many
        made.append(between)
        length += len(between)
    return "".join(made), tuple(blocks)
