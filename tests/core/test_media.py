"""What images, audio and files weigh, against the providers' own worked examples."""

from __future__ import annotations

import base64
import io
import struct
import wave
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import media
from proxy.core.media import UNKNOWN, Media

FAMILIES = [
    "gpt-4o", "gpt-4o-mini", "gpt-4.1-mini", "gpt-5.1", "gpt-5.4", "gpt-5.6", "o3", "claude-sonnet-4-5",
    "claude-opus-5",
    "gemini-2.5-pro", "gemini-3", "qwen2.5-vl", "qwen3-vl", "pixtral-12b", "gemma-3",
]  # fmt: skip


def png(width: int, height: int) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + head
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(head)) + chunk + struct.pack(">I", zlib.crc32(chunk))


def jpeg(width: int, height: int, metadata: int = 0) -> bytes:
    packed = b"".join(b"\xff\xe1" + struct.pack(">H", 60_002) + b"x" * 60_000 for _ in range(metadata))
    frame = b"\xff\xc0" + struct.pack(">HBHHB", 11, 8, height, width, 1) + b"\x01\x11\x00"
    return b"\xff\xd8" + packed + frame + b"\xff\xd9"


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\x00\x00\x00;"


def webp(width: int, height: int) -> bytes:
    body = (
        b"VP8X"
        + struct.pack("<I", 10)
        + b"\x00" * 4
        + struct.pack("<I", width - 1)[:3]
        + struct.pack("<I", height - 1)[:3]
    )
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def url(raw: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(raw).decode()}"


@pytest.mark.parametrize(
    ("model", "size", "detail", "tokens"),
    [
        # OpenAI's guide: tiles.
        ("gpt-4o", (1024, 1024), "high", 765), ("gpt-4o", (2048, 4096), "high", 1_105), ("gpt-4o", (99, 99), "low", 85),
        ("gpt-5.1", (1024, 1024), "auto", 630), ("gpt-5.1", (2048, 4096), "auto", 910),
        ("o3", (2048, 4096), "auto", 975),
        ("gpt-4o-mini", (1024, 1024), "auto", 25_501), ("gpt-4o-mini-2024-07-18", (2048, 4096), "auto", 36_835),
        # OpenAI's guide: patches.
        ("gpt-5.4", (1024, 1024), "high", 1_229), ("gpt-5.4", (2048, 2048), "high", 3_000),
        ("gpt-5.4", (1920, 1080), "auto", 2_448), ("gpt-5.5", (3840, 2160), "auto", 9_792),
        ("gpt-5.6", (1024, 1024), "low", 308), ("gpt-5.6", (4032, 3024), "auto", 14_364),
        ("gpt-5-mini", (1800, 2400), "auto", 1_743),
        # Anthropic's guide.
        ("claude-sonnet-4-5", (200, 200), "auto", 64), ("claude-sonnet-4-5", (1000, 1000), "auto", 1_296),
        ("claude-sonnet-4-5", (1092, 1092), "auto", 1_521), ("claude-sonnet-4-5", (1920, 1080), "auto", 1_560),
        ("claude-sonnet-4-5", (1075, 1520), "auto", 1_551), ("anthropic/claude-opus-5", (1920, 1080), "auto", 2_691),
        ("claude-opus-5", (3840, 2160), "auto", 4_784), ("claude-opus-4-8", (2000, 1500), "auto", 3_888),
        # Google's guides, and measured.
        ("gemini-2.5-pro", (960, 540), "auto", 1_548), ("gemini-2.5-pro", (384, 300), "auto", 258),
        ("gemini-3-pro", (1000, 1000), "auto", 1_089), ("gemini-3-pro", (1600, 900), "auto", 1_100),
        # Open models' image processors.
        ("qwen2.5-vl-7b", (1024, 1024), "auto", 1_371), ("qwen/qwen3-vl-8b", (1024, 1024), "auto", 1_026),
        ("pixtral-12b", (1024, 1024), "auto", 4_160), ("mistral-small-3.1", (1920, 1080), "auto", 1_736),
        ("gemma-3-27b", (4000, 4000), "auto", 256),
        ("nobody-knows", (4000, 4000), "auto", 1_500),
    ],
)  # fmt: skip
def test_an_image_weighs_what_its_provider_says(model: str, size: tuple[int, int], detail: str, tokens: int) -> None:
    """By family, size and detail."""
    assert media.of(model).image(size, detail) == tokens


@pytest.mark.parametrize(
    "raw",
    [png(1024, 1024), jpeg(1024, 1024), jpeg(1024, 1024, metadata=5), gif(1024, 1024), webp(1024, 1024)],
    ids=["png", "jpeg", "jpeg with metadata", "gif", "webp"],
)
@pytest.mark.parametrize("form", ["object", "string", "anthropic"])
def test_its_size_is_read_from_its_header(raw: bytes, form: str) -> None:
    """Whatever its format, and in whatever form a part holds it; its bytes are not looked at."""
    address = url(raw + b"\x00" * 300_000)
    part: dict[str, object] = {"image_url": {"url": address, "detail": "high"}}
    if form == "string":
        part = {"image_url": address, "detail": "high"}
    elif form == "anthropic":
        part = {"source": {"type": "base64", "data": address.partition(",")[2]}}
    assert media.image(part, media.of("gpt-4o")) == 765


@pytest.mark.parametrize(
    "part",
    [
        {}, {"image_url": None}, {"image_url": {"url": 5}}, {"image_url": {"url": "https://example.com/a.png"}},
        {"image_url": "data:image/png;base64,!!!!"}, {"image_url": "data:image/png;base64,"},
        {"image_url": url(b"\x89PNG\r\n\x1a\n")}, {"image_url": url(b"\xff\xd8\xff")}, {"source": {"url": "u"}},
        {"image_url": url(png(0, 0))},
    ],
)  # fmt: skip
def test_an_image_that_cannot_be_seen_has_the_usual_size(part: dict[str, object]) -> None:
    """A remote one, and what is none: 1920 x 1080."""
    assert media.image(part, media.of("gpt-4o")) == 1_105


@given(
    st.sampled_from(FAMILIES),
    st.tuples(st.integers(1, 20_000), st.integers(1, 20_000)),
    st.sampled_from(["low", "high", "auto", "x"]),
)
def test_any_size_has_a_weight(family: str, size: tuple[int, int], detail: str) -> None:
    """A thread of one pixel's height too."""
    assert 0 < media.of(family).image(size, detail) < 500_000


@given(st.binary(max_size=300))
def test_no_bytes_break_the_reader(raw: bytes) -> None:
    """Of headers, of sound, of files."""
    for start in (
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff",
        b"GIF89a",
        b"RIFF0000WEBP",
        b"<svg",
        b"II*\x00",
        b"RIFF0000WAVEfmt ",
    ):
        data = url(start + raw)
        assert media.image({"image_url": data}, UNKNOWN) > 0
        assert media.audio({"input_audio": {"data": data.partition(",")[2], "format": "wav"}}, UNKNOWN) >= 0
        assert media.file({"file": {"file_data": data}}, UNKNOWN, len) >= 0


def sound(seconds: int) -> str:
    out = io.BytesIO()
    with wave.open(out, "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(16_000)
        made.writeframes(b"\x00\x00" * 16_000 * seconds)
    return base64.b64encode(out.getvalue()).decode()


@pytest.mark.parametrize(
    ("model", "held", "tokens"),
    [
        ("gpt-4o-audio-preview", {"data": sound(30), "format": "wav"}, 301),
        ("gemini-2.5-pro", {"data": sound(30), "format": "wav"}, 961),
        ("gpt-4o", {"data": "A" * 64_000, "format": "mp3"}, 60),
        ("gpt-4o", {}, 600),
        ("gpt-4o", None, 600),
    ],
)
def test_audio_weighs_by_its_length(model: str, held: object, tokens: int) -> None:
    """A recording's from its header, another's from its bytes, an unseen one's of a minute."""
    assert media.audio({"input_audio": held}, media.of(model)) == tokens


PDF = b"%PDF-1.7\n" + b"".join(b"<< /Type /Page /Parent 1 0 R >>\n" for _ in range(7)) + b"<< /Type /Pages /Count 7 >>"


@pytest.mark.parametrize(
    ("held", "tokens"),
    [
        ({"file_data": url(PDF, "application/pdf")}, 7 * 1_465),
        ({"file_data": base64.b64encode(PDF).decode()}, 7 * 1_465),
        ({"file_data": url(b"%PDF-1.7" + b"\x00" * 100_000, "application/pdf")}, 2 * 1_465),
        ({"file_data": url(b"word " * 100, "text/plain")}, 500),
        ({"file_data": url(b"\xff\xfe" * 100)}, 1_465),
        ({"file_id": "file-1"}, 1_465),
        (None, 1_465),
    ],
)
def test_a_file_weighs_by_its_pages_or_its_words(held: object, tokens: int) -> None:
    """A page is its text and an image of it."""
    assert media.file({"file": held}, media.of("gpt-4o"), len) == tokens


def test_every_family_has_a_name() -> None:
    """By which what was counted is told apart."""
    named = [media.of(model) for model in FAMILIES]
    assert all(isinstance(each, Media) and each.family for each in named)
    assert UNKNOWN.family == ""


def test_a_long_address_is_read_in_no_time(guard: Callable[[int], AbstractContextManager[None]]) -> None:
    """Whatever it looks like."""
    with guard(5):
        for inner in ("a" * 2_000_000, ";" * 2_000_000, "a;" + "a;" * 1_000_000 + ";base64,x"):
            address = f"data:{inner}"
            assert media.image({"image_url": address}, UNKNOWN) == 1_500
            assert media.file({"file": {"file_data": address}}, UNKNOWN, len) > 0


@pytest.mark.parametrize(
    "raw",
    [
        b'<svg width="' + b"9" * 400 + b'" height="1"/>',
        bytes.fromhex("52494646dc0b000057415645666d74201000000001000142803e0000007d06000200108464612161f20b0000"),
    ],
    ids=["a picture too wide", "a sound that is none"],
)
def test_a_broken_header_is_no_failure(raw: bytes) -> None:
    """It is what cannot be seen."""
    data = base64.b64encode(raw).decode()
    assert media.image({"image_url": f"data:x;base64,{data}"}, media.of("gpt-5.6")) > 0
    assert media.audio({"input_audio": {"data": data, "format": "wav"}}, UNKNOWN) > 0
