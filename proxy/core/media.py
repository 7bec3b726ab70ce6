"""What images, audio and files weigh: by model family, size and `detail`, as the providers document it.

`{"type":"image_url","image_url":{"url":"data:image/png;base64,…","detail":"low"}}` → tokens. Sizes are read from the
header; what stands at a remote address is taken for 1920 × 1080. Nothing here is counted as text but text.

Sources (read 2026-11-29): OpenAI, images and vision guide; Anthropic, vision guide; Google, media resolution and token
counting guides; for open models their own image processors (transformers, mistral-common).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
import math
import re
import wave
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import imagesize

Size = tuple[int, int]

USUAL_SIZE: Size = (1920, 1080)
"""Of an image whose size cannot be seen."""
_HEADER_CHARS = 1 << 19
"""How much base64 is decoded to find a size: more than any camera's metadata."""
_PDF_PAGE = re.compile(rb"/Type\s*/Page(?![a-zA-Z])")
_PDF_BYTES_PER_PAGE = 60_000
"""Where pages cannot be told apart because the file compresses its own structure."""
_TEXT_PER_PAGE = 700
_BYTES_PER_SECOND = 8_000
"""Of compressed speech (64 kbit/s)."""
_UNSEEN_SECONDS = 60.0
_LONGEST_HEAD = 300
_LEAST_DATA_CHARS = 1_024
_DATA = re.compile(
    r"(?<![A-Za-z0-9+/_-])(?:data:[\w.+-]{1,60}/[\w.+-]{1,90}(?:;[\w.=+-]{1,90}){0,2};base64,)?"
    rf"[A-Za-z0-9+/_-]{{{_LEAST_DATA_CHARS},}}={{0,2}}"
)
"""What is no text: a data URL, or so long a run of base64's letters."""
_OPAQUE_CHARS_PER_TOKEN = 16
"""Of encrypted reasoning and signatures. Where a provider reads it, six to twelve characters hold a token; but of most
turns it reads none, and no history is to be cut for what is not read."""
_LARGEST_SIDE = 1_000_000

Rule = Callable[[Size, str], int]


@dataclass(frozen=True, slots=True)
class Bound:
    """How far an image is made smaller: its longest edge, and how many patches it may have (None: any number)."""

    edge: int
    patches: int | None = None


@dataclass(frozen=True, slots=True)
class Patches:
    """OpenAI's newer rule: 32-pixel patches times a factor. `other` holds for every `detail` not named."""

    factor: float
    other: Bound
    named: Mapping[str, Bound] = field(default_factory=dict)

    def __call__(self, size: Size, detail: str) -> int:
        """Return an image's tokens."""
        bound = self.named.get(detail, self.other)
        width, height = _within(size, bound.edge)
        patches = _cells(width, height, 32)
        if bound.patches is not None and patches > bound.patches:
            scale = math.sqrt(32 * 32 * bound.patches / (width * height))
            across, down = width * scale / 32, height * scale / 32
            scale *= min(math.floor(across) / across, math.floor(down) / down)
            patches = _cells(math.floor(width * scale), math.floor(height * scale), 32)
        return math.ceil(patches * self.factor)


@dataclass(frozen=True, slots=True)
class Tiles:
    """OpenAI's older rule: within 2048 pixels, the short side 768 at most, then so much for each tile of 512."""

    base: int
    tile: int

    def __call__(self, size: Size, detail: str) -> int:
        """Return an image's tokens."""
        if detail == "low":
            return self.base
        width, height = _within(size, 2048)
        short = min(width, height)
        if short > 768:
            width, height = (max(1, math.floor(side * 768 / short)) for side in (width, height))
        return self.base + self.tile * _cells(width, height, 512)


@dataclass(frozen=True, slots=True)
class Cells:
    """Anthropic's rule: 28-pixel cells, the image made smaller until an edge and a number of tokens hold it."""

    edge: int
    most: int

    def __call__(self, size: Size, detail: str) -> int:  # noqa: ARG002 -- takes none
        """Return an image's tokens."""
        wide, high = max(size), min(size)
        if self._fits(wide, high):
            return _cells(wide, high, 28)
        low, top = 1, wide
        while low < top:
            middle = (low + top + 1) // 2
            low, top = (middle, top) if self._fits(middle, _down(middle, wide, high)) else (low, middle - 1)
        return _cells(low, _down(low, wide, high), 28)

    def _fits(self, width: int, height: int) -> bool:
        return math.ceil(max(width, height) / 28) * 28 <= self.edge and _cells(width, height, 28) <= self.most


@dataclass(frozen=True, slots=True)
class Budgeted:
    """Gemini 3's rule: as many cells of the image's own shape as a budget holds."""

    most: int
    low: int

    def __call__(self, size: Size, detail: str) -> int:
        """Return an image's tokens."""
        most = self.low if detail == "low" else self.most
        across, down = (math.floor(math.sqrt(most * one / other)) for one, other in (size, size[::-1]))
        return min(most, max(1, across) * max(1, down))


@dataclass(frozen=True, slots=True)
class Crops:
    """Gemini 2's rule: 258, or 258 for each crop of a larger image."""

    def __call__(self, size: Size, detail: str) -> int:  # noqa: ARG002 -- takes none
        """Return an image's tokens."""
        if max(size) <= 384:
            return 258
        unit = min(768, max(256, math.floor(min(size) / 1.5)))
        return 258 * _cells(*size, unit)


@dataclass(frozen=True, slots=True)
class Smart:
    """Qwen-VL's rule: cells of `factor` pixels, the area held between two bounds."""

    factor: int
    least: int
    most: int

    def __call__(self, size: Size, detail: str) -> int:  # noqa: ARG002 -- takes none
        """Return an image's tokens, its two marks among them."""
        area, f = size[0] * size[1], self.factor
        if area > self.most:
            beta = math.sqrt(area / self.most)
            sides = [max(1, math.floor(side / beta / f)) for side in size]
        elif area < self.least:
            beta = math.sqrt(self.least / area)
            sides = [math.ceil(side * beta / f) for side in size]
        else:
            sides = [max(1, round(side / f)) for side in size]
        return sides[0] * sides[1] + 2


@dataclass(frozen=True, slots=True)
class Rows:
    """Mistral's rule: cells, and a token at the end of each row."""

    edge: int
    cell: int

    def __call__(self, size: Size, detail: str) -> int:  # noqa: ARG002 -- takes none
        """Return an image's tokens."""
        width, height = _within(size, self.edge)
        return (math.ceil(width / self.cell) + 1) * math.ceil(height / self.cell)


@dataclass(frozen=True, slots=True)
class Flat:
    """Every image weighs the same."""

    tokens: int

    def __call__(self, size: Size, detail: str) -> int:  # noqa: ARG002 -- takes none
        """Return an image's tokens."""
        return self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """A model family's rules: an image, a second of audio, and the image that stands for a page of a file."""

    family: str = ""
    image: Rule
    audio_per_second: float = 32.0
    page: int = 1_600


_LARGE = Bound(2048, 2500)
_LOW = Bound(512)
_SMALL = Bound(2048, 1536)
UNKNOWN = Media(image=Flat(1_500))
_GPT_4O = Media(image=Tiles(85, 170), audio_per_second=10.0, page=765)
_CLAUDE = Media(image=Cells(1568, 1568), page=1_600)
_CLAUDE_LARGE = Media(image=Cells(2576, 4784), page=1_600)
_GEMINI_3 = Media(image=Budgeted(1120, 280), page=560)


def _openai(image: Rule, page: int = 1_229) -> Media:
    return Media(image=image, audio_per_second=10.0, page=page)


_RULES: Mapping[str, Media] = {
    "gpt-4o-mini": _openai(Tiles(2833, 5667), 25_501),
    "gpt-4o": _GPT_4O,
    "chatgpt-4o": _GPT_4O,
    "gpt-4.1-mini": _openai(Patches(1.62, Bound(2048, 6144)), 1_659),
    "gpt-4.1-nano": _openai(Patches(2.46, _SMALL), 2_520),
    "gpt-4": _GPT_4O,
    "o1": _openai(Tiles(75, 150), 675),
    "o3": _openai(Tiles(75, 150), 675),
    "o4-mini": _openai(Patches(1.72, _SMALL), 1_762),
    "gpt-5-mini": _openai(Patches(1.2, _SMALL)),
    "gpt-5-nano": _openai(Patches(1.5, _SMALL), 1_536),
    "gpt-5.2": _openai(Patches(1.2, Bound(2048, 6144))),
    "gpt-5.3": _openai(Patches(1.2, _SMALL)),
    "gpt-5.4": _openai(Patches(1.2, _LARGE, {"low": Bound(2048, 6144), "original": Bound(6000, 10_000)})),
    "gpt-5.5": _openai(Patches(1.2, Bound(6000, 10_000), {"low": _LOW, "high": _LARGE})),
    "gpt-5.6": _openai(Patches(1.2, Bound(65_535), {"low": _LOW, "high": _LARGE})),
    "gpt-5": _openai(Tiles(70, 140), 630),
    "gpt-6": _openai(Patches(1.2, Bound(65_535), {"low": _LOW, "high": _LARGE})),
    "claude-3": _CLAUDE,
    "claude-sonnet-4": _CLAUDE,
    "claude-opus-4": _CLAUDE,
    "claude-opus-4-7": _CLAUDE_LARGE,
    "claude-opus-4-8": _CLAUDE_LARGE,
    "claude-haiku-4": _CLAUDE,
    "claude": _CLAUDE_LARGE,
    "gemini-2": Media(image=Crops(), page=258),
    "gemini-1": Media(image=Crops(), page=258),
    "gemini": _GEMINI_3,
    "qwen3": Media(image=Smart(32, 65_536, 16_777_216)),
    "qwen": Media(image=Smart(28, 3_136, 12_845_056)),
    "gemma-4": Media(image=Flat(280)),
    "gemma": Media(image=Flat(256)),
    "pixtral": Media(image=Rows(1024, 16)),
    "mistral": Media(image=Rows(1540, 28), audio_per_second=12.5),
    "magistral": Media(image=Rows(1540, 28)),
    "grok": Media(image=Flat(1_792)),
}
_FAMILIES = {name: dataclasses.replace(rules, family=name) for name, rules in _RULES.items()}
_LONGEST_FIRST = sorted(_FAMILIES, key=len, reverse=True)


def of(model: str) -> Media:
    """Return the rules of a model's family, by its name in lower case; for an unknown one a guess that is stated."""
    name = model.rpartition("/")[2].lower()
    return next((_FAMILIES[known] for known in _LONGEST_FIRST if name.startswith(known)), UNKNOWN)


def image(part: Mapping[str, object], media: Media) -> int:
    """Return the tokens of an image part, in OpenAI's or Anthropic's form."""
    held = part.get("image_url")
    detail, address = part.get("detail"), held
    if isinstance(held, dict):
        detail, address = held.get("detail", detail), held.get("url")
    source = part.get("source")
    if isinstance(source, dict):
        data = source.get("data")
        address = f"data:;base64,{data}" if isinstance(data, str) else source.get("url")
    size = _size(address) if isinstance(address, str) else None
    return media.image(size or USUAL_SIZE, detail if isinstance(detail, str) else "auto")


def audio(part: Mapping[str, object], media: Media) -> int:
    """Return the tokens of `{"type":"input_audio","input_audio":{"data":"…","format":"wav"}}`, by its length."""
    held = part.get("input_audio")
    data = held.get("data") if isinstance(held, dict) else None
    wav = isinstance(held, dict) and held.get("format") == "wav"
    seconds = _seconds(data, wav=wav) if isinstance(data, str) else None
    return math.ceil((_UNSEEN_SECONDS if seconds is None else seconds) * media.audio_per_second)


def file(part: Mapping[str, object], media: Media, count: Callable[[str], int]) -> int:
    """Return the tokens of a file part: of a PDF text and image of each page, of a text its words.

    What the proxy cannot see (`file_id`, a URL) counts as one page.
    """
    held = part.get("file")
    data = held.get("file_data") if isinstance(held, dict) else part.get("file_data")
    page = _TEXT_PER_PAGE + media.page
    if not isinstance(data, str):
        return page
    kind, inner = _data(data) or ("", data)
    raw = _decoded(inner)
    if not raw:
        return page
    if raw.startswith(b"%PDF") or "pdf" in kind:
        return page * (len(_PDF_PAGE.findall(raw)) or math.ceil(max(1, len(raw)) / _PDF_BYTES_PER_PAGE))
    try:
        return count(raw.decode())
    except UnicodeDecodeError:
        return page * math.ceil(max(1, len(raw)) / _PDF_BYTES_PER_PAGE)


def apart(text: str) -> tuple[str, list[str]]:
    """Take what is data out of a string that stands outside of a message's content: the text that is left, and each."""
    if len(text) < _LEAST_DATA_CHARS:
        return text, []
    return _DATA.sub(" ", text), _DATA.findall(text)


def data(held: str, media: Media, count: Callable[[str], int]) -> int:
    """Return the tokens of a data URL, or of base64 alone, that is no content part; what it holds nobody may know.

    Never more than its length: that no token is less than a byte holds for it too.
    """
    kind, inner = _data(held) or ("", held)
    if kind.startswith("audio/"):
        tokens = audio({"input_audio": {"data": inner, "format": "wav" if "wav" in kind else ""}}, media)
    elif kind.startswith("image/") or _size(f"data:;base64,{inner}"):
        tokens = image({"image_url": f"data:;base64,{inner}"}, media)
    elif kind:
        tokens = file({"file_data": held}, media, count)
    else:
        tokens = len(held) // _OPAQUE_CHARS_PER_TOKEN
    return min(tokens, len(held))


def _size(address: str) -> Size | None:
    """Read an image's size from its header; None for a remote one, or what is no image."""
    found = _data(address)
    if found is None:
        return None
    raw = _decoded(found[1][:_HEADER_CHARS])
    try:
        width, height = (min(int(side), _LARGEST_SIDE) for side in imagesize.get(io.BytesIO(raw)))
    except Exception:  # noqa: BLE001 -- whatever a broken header does to its reader, it has no size
        return None
    return (width, height) if width > 0 and height > 0 else None


def _data(address: str) -> tuple[str, str] | None:
    """Take `data:image/png;base64,…` apart: its type, and what it holds; None for another address."""
    comma = address.find(",", 0, _LONGEST_HEAD)
    head = address[:comma].lower() if comma >= 0 else ""
    if not head.startswith("data:") or not head.endswith(";base64"):
        return None
    return head[5:].partition(";")[0], address[comma + 1 :]


def _seconds(data: str, *, wav: bool) -> float | None:
    length = len(data) * 3 / 4
    if wav:
        try:
            with wave.open(io.BytesIO(_decoded(data[:_HEADER_CHARS]))) as opened:
                rate = opened.getframerate() * opened.getnchannels() * opened.getsampwidth()
        except Exception:  # noqa: BLE001 -- as above
            return None
        return length / rate if rate else None
    return length / _BYTES_PER_SECOND


def _decoded(data: str) -> bytes:
    """Decode base64, as far as it is: of a piece of it what is whole."""
    whole = data[: len(data) - len(data) % 4]
    try:
        return base64.b64decode(whole)
    except (binascii.Error, ValueError):
        return b""


def _within(size: Size, edge: int) -> Size:
    longest = max(size)
    if longest <= edge:
        return size
    return max(1, round(size[0] * edge / longest)), max(1, round(size[1] * edge / longest))


def _down(width: int, wide: int, high: int) -> int:
    return max(1, round(width * high / wide))


def _cells(width: int, height: int, side: int) -> int:
    return math.ceil(width / side) * math.ceil(height / side)
