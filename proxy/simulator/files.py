"""``/v1/files``: https://platform.openai.com/docs/api-reference/files (read 2026-11)."""

from proxy.simulator.exchange import Exchange
from proxy.simulator.multipart import parse
from proxy.simulator.record import StoredFile, shelve
from proxy.simulator.refusal import Refusal


async def upload(exchange: Exchange) -> None:
    """Keep a file, its multipart body byte for byte too."""
    form = parse(exchange.entry.headers.get("content-type", ""), exchange.raw)
    part = form.file("file")
    stored = StoredFile(
        id=f"file-sim{exchange.entry.index:08d}",
        filename=part.filename or "",
        purpose=form.text("purpose"),
        content_type=part.content_type,
        content=part.content,
        raw=exchange.raw,
        created_at=exchange.created,
    )
    shelve(exchange.simulator.files, stored.id, stored)
    await exchange.json(_shown(stored))


async def listing(exchange: Exchange) -> None:
    """List all files, newest first."""
    data = [_shown(stored) for stored in reversed(exchange.simulator.files.values())]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    await exchange.json({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": False})


async def retrieve(exchange: Exchange) -> None:
    """Describe one file."""
    await exchange.json(_shown(_stored(exchange)))


async def content(exchange: Exchange) -> None:
    """Give a file's bytes back."""
    stored = _stored(exchange)
    await exchange.send(stored.content, stored.content_type)


async def delete(exchange: Exchange) -> None:
    """Drop one file."""
    stored = _stored(exchange)
    del exchange.simulator.files[stored.id]
    await exchange.json({"id": stored.id, "object": "file", "deleted": True})


def _stored(exchange: Exchange) -> StoredFile:
    identity = exchange.scope["path_params"]["id"]
    stored = exchange.simulator.files.get(identity)
    if stored is None:
        raise Refusal(status=404, message=f"No such File object: {identity}", param="id")
    return stored


def _shown(stored: StoredFile) -> dict[str, object]:
    return {
        "id": stored.id,
        "object": "file",
        "bytes": len(stored.content),
        "created_at": stored.created_at,
        "filename": stored.filename,
        "purpose": stored.purpose,
        "status": "processed",
    }
