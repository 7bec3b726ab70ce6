"""Downstream path → upstream URL: always exactly one version segment, whatever the base and the client wrote.

Base `https://host/v1`, `https://host/v1/` or `https://host`; path `/v1/chat/completions`, `/chat/completions`,
`//v1/chat/completions/`. A base that names its own version (`…/v1beta/openai`, `…/api/paas/v4`) is taken as it is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from urllib.parse import unquote, urlsplit

import httpx
import msgspec

from proxy.core import body as json_body
from proxy.errors import BAD_VALUE, Odd, StrataError

_VERSION = re.compile(rb"^v\d+[a-z0-9]*$")
_ROOTS = frozenset(
    {
        b"chat", b"completions", b"responses", b"models", b"embeddings", b"files", b"uploads", b"batches", b"images",
        b"audio", b"moderations", b"fine_tuning", b"assistants", b"threads", b"vector_stores", b"evals", b"realtime",
        b"containers", b"conversations", b"organization", b"videos", b"messages", b"rerank",
    }
)  # fmt: skip
"""Resources that live under `/v1` at every provider; other paths (`/props`, `/tokenize`) are an engine's own."""

_CHAT = re.compile(rb"^(?:v1/)?chat/completions$|^openai/(?:v1/)?(?:deployments/[^/]+/)?chat/completions$")
_STATELESS = frozenset({b"completions", b"embeddings", b"moderations", b"images", b"audio", b"rerank"})
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_DEPLOYMENT = re.compile(rb"(?:^|/)deployments/([^/?]+)")
_DISGUISED = re.compile(rb"^(?:\.|%2e){1,2}$|(?:%2f|%5c|\\)(?:\.|%2e){2}|^(?:\.|%2e){2}(?:%2f|%5c|\\)", re.IGNORECASE)
"""Dot segments, spelled out or escaped."""
_HERE = re.compile(rb"^(?:\.|%2e)$", re.IGNORECASE)
"""The one dot segment that leads nowhere else."""


def normal(raw_path: bytes) -> bytes:
    """Return a path without doubled, leading or trailing slashes; escapes stay as they are."""
    return re.sub(rb"/{2,}", b"/", raw_path).strip(b"/")


def is_chat(path: bytes) -> bool:
    """Whether a normal path is the chat route, Azure's forms included."""
    return bool(_CHAT.match(path))


def is_stateless(method: str, path: bytes) -> bool:
    """Whether a route keeps nothing at the provider that another holder of the same key could read.

    Stored chat completions are listed at the chat route itself, fine-tuned models are deleted at the models': so the
    method counts. A path that could mean another one to whoever decodes it is not believed.
    """
    segments = [part for part in path.split(b"/") if part not in {b"v1", b"openai"}]
    if segments[:1] == [b"deployments"]:
        segments = segments[2:]
    if not segments or any(_DISGUISED.search(part) for part in segments):
        return False
    if segments[0] == b"chat":
        return method == "POST" and segments == [b"chat", b"completions"]
    if segments[0] == b"models":
        return method in _READING
    return segments[0] in _STATELESS and method in {"POST", "OPTIONS"}


def makes_response(method: str, path: bytes) -> bool:
    """Whether a route makes a response, which is kept at the provider unless the request says otherwise."""
    return method == "POST" and [part for part in path.split(b"/") if part not in {b"v1", b"openai"}] == [b"responses"]


def keeps_nothing(body: bytes) -> bool:
    """Whether a request for a response says `"store": false`, and goes on from nothing that was kept.

    A repeated member may be taken either way, and some servers read its name in any case.
    """
    named = [(member.key.casefold(), body[member.value : member.end].strip()) for member in _members(body)]
    kept = {value for key, value in named if key in {"previous_response_id", "conversation", "background"}}
    return {value for key, value in named if key == "store"} == {b"false"} and kept <= {b"null", b"false"}


_BOUNDARY = re.compile(r"boundary=(?:\"([^\"]{1,200})\"|([^;\s\"]{1,200}))", re.IGNORECASE)
_NAMES_MODEL = re.compile(
    rb"""(?<!file)name\*?\s*=\s*(?:[\w-]*'[\w-]*')?"?models?(?:\[\])?"?\s*(?:[;\r\n]|$)""", re.IGNORECASE
)
_LONGEST_HEAD, _LONGEST_VALUE = 4_096, 300
_NEEDS_MODEL = frozenset(
    {b"chat", b"completions", b"embeddings", b"responses", b"messages", b"images", b"audio", b"videos", b"rerank",
     b"realtime"}
)  # fmt: skip
"""Resources for which an upstream would choose a model where none is named."""


def models_asked(raw_path: bytes, body: bytes, *, content_type: str = "") -> tuple[str, ...]:
    """Return every name by which an upstream may take a request's model: of Azure's path, of the body's members.

    A repeated member may be taken either way, some servers read its name in any case, and some take a list of `models`
    to fall back on. `("",)` where none is named and the upstream would choose one.
    """
    named = [unquote(found.decode("latin-1")) for found in _DEPLOYMENT.findall(raw_path)]
    if body.lstrip().startswith(b"{"):
        named += _of_members(body, nested=True)
    if content_type.lower().startswith("multipart/"):
        named += _of_parts(body, content_type)
    segments = {part for part in normal(raw_path).split(b"/") if part}
    return tuple(named) or (("",) if segments & _NEEDS_MODEL else ())


def _of_members(body: bytes, *, nested: bool) -> list[str]:
    """Read `model` and `models` of an object, and of its `session`: so the realtime routes name theirs."""
    named: list[str] = []
    for member in _members(body):
        key, value = member.key.casefold(), body[member.value : member.end]
        if key == "session" and nested:
            named += _of_members(value, nested=False)
        if key not in {"model", "models"}:
            continue
        try:
            read = msgspec.json.decode(value)
        except msgspec.DecodeError:
            read = value.decode("utf-8", "replace")
        each = read if isinstance(read, list) and key == "models" else [read]
        named += [name if isinstance(name, str) else "" for name in each]
    return named


def _of_parts(body: bytes, content_type: str) -> list[str]:
    """Read the parts that are named `model`; what cannot be taken apart is taken for one that names none."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        return [""]
    named = []
    for part in body.split(b"--" + (found[1] or found[2]).encode("latin-1"))[1:]:
        head, _, value = part.partition(b"\r\n\r\n")
        if len(head) > _LONGEST_HEAD:
            named.append("")
        elif _NAMES_MODEL.search(head):
            named.append(value[:_LONGEST_VALUE].decode("utf-8", "replace").strip())
    return named


def _members(body: bytes) -> Iterable[json_body.Member]:
    """Return a body's members; slowly only where it is odd."""
    try:
        return json_body.split(body).values()
    except (Odd, StrataError):
        return json_body.lenient(body)


def base_of(url: str) -> tuple[str, str, int | None, str]:
    """Return an upstream's base, however it is spelled: equal for `https://API.test/v1/` and `https://api.test:443`."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    path = re.sub(r"/{2,}", "/", parts.path).rstrip("/").removesuffix("/v1")
    return parts.scheme, (parts.hostname or "").rstrip("."), port, path


_SHORT = 1_024


class Target:
    """Where one upstream is."""

    def __init__(self, base: str) -> None:
        url = httpx.URL(base)
        self._origin = url.copy_with(raw_path=b"/", fragment=None)
        segments = [part for part in url.raw_path.partition(b"?")[0].split(b"/") if part]
        self._versioned = any(_VERSION.match(part) for part in segments)
        self._plain = bool(segments) and segments[-1] == b"v1"
        self._root = segments[:-1] if self._plain else segments
        self._remembered = functools.lru_cache(maxsize=1024)(self._url)

    def url(self, raw_path: bytes, query: bytes) -> httpx.URL:
        """Return the upstream's URL for a downstream path (escapes kept) and query; most are the same few.

        Raises StrataError for a path that leads out of the upstream's base.
        """
        return self._remembered(raw_path, query) if len(raw_path) + len(query) <= _SHORT else self._url(raw_path, query)

    def _url(self, raw_path: bytes, query: bytes) -> httpx.URL:
        if any(_DISGUISED.search(part) and not _HERE.match(part) for part in raw_path.split(b"/")):
            raise StrataError(BAD_VALUE, f"path: {raw_path[:200]!r} has segments that lead upwards", param="path")
        path = raw_path.lstrip(b"/")
        first, slash, rest = path.partition(b"/")
        segments = list(self._root)
        versioned = first == b"v1" or first in _ROOTS
        if versioned and (self._plain or not self._versioned):
            segments.append(b"v1")
        if first != b"v1":
            segments.append(path)
        elif slash:
            segments.append(rest)
        raw = b"/" + b"/".join(segments)
        return self._origin.copy_with(raw_path=raw + (b"?" + query if query else b""))
