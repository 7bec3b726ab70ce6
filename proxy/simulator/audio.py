"""``/v1/audio``: https://platform.openai.com/docs/api-reference/audio (read 2026-11)."""

from hashlib import sha256, shake_256

from proxy.simulator.answers import prose
from proxy.simulator.exchange import Exchange
from proxy.simulator.multipart import parse
from proxy.simulator.shape import text
from proxy.simulator.tokens import tokenizer
from proxy.simulator.validity import check_present

_PLAIN_FORMATS = ("text", "srt", "vtt")
_MEDIA_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/opus",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
_BYTES_PER_CHARACTER = 64
_CHUNK_BYTES = 1024


async def transcriptions(exchange: Exchange) -> None:
    """Say words seeded by the file, and the size and digest of the file and of the whole body as received."""
    form = parse(exchange.entry.headers.get("content-type", ""), exchange.raw)
    part = form.file("file")
    model = form.text("model")
    digest = sha256(part.content).hexdigest()
    heard = prose(digest, tokenizer(model), words=12).text or ""
    if form.text("response_format") in _PLAIN_FORMATS:
        await exchange.send(f"{heard}\n".encode(), "text/plain; charset=utf-8")
        return
    await exchange.json(
        {
            "text": heard,
            "file_sha256": digest,
            "file_bytes": len(part.content),
            "sha256": exchange.entry.body_sha256,
            "bytes": exchange.entry.body_bytes,
        }
    )


async def speech(exchange: Exchange) -> None:
    """Send bytes seeded by input and voice, in chunks of no stated total."""
    body = exchange.body()
    check_present(body, "input", "voice")
    media_type = _MEDIA_TYPES.get(text(body.get("response_format")), _MEDIA_TYPES["mp3"])
    sound = speech_bytes(text(body["input"]), text(body["voice"]))
    chunks = (sound[start : start + _CHUNK_BYTES] for start in range(0, len(sound), _CHUNK_BYTES))
    await exchange.send_chunks(chunks, media_type)


def speech_bytes(spoken: str, voice: str) -> bytes:
    """Return the bytes that `speech` sends for this text and voice."""
    seed = f"{voice}\0{spoken}".encode("utf-8", "replace")
    return shake_256(seed).digest(max(_CHUNK_BYTES, _BYTES_PER_CHARACTER * len(spoken)))
