"""What can go wrong, and whose fault it is.

Core raises these with the offending field and value; `Downstream.refuse` turns one into an HTTP answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How one kind of failure looks to an OpenAI SDK: `{"error": {"message", "type", "param", "code"}}`."""

    status: int
    type: str
    code: str


BAD_JSON = Fault(status=400, type="invalid_request_error", code="invalid_json")
BAD_VALUE = Fault(status=400, type="invalid_request_error", code="invalid_value")
BAD_ENCODING = Fault(status=415, type="invalid_request_error", code="unsupported_content_encoding")
TOO_LONG = Fault(status=400, type="invalid_request_error", code="context_length_exceeded")
TOO_LARGE = Fault(status=413, type="invalid_request_error", code="request_too_large")
HEAD_TOO_LARGE = Fault(status=431, type="invalid_request_error", code="request_head_too_large")
UNKNOWN_KEY = Fault(status=401, type="invalid_request_error", code="invalid_api_key")
NOT_ALLOWED = Fault(status=403, type="invalid_request_error", code="route_not_allowed")
NO_MODEL = Fault(status=404, type="invalid_request_error", code="model_not_found")
RATE_LIMITED = Fault(status=429, type="rate_limit_error", code="rate_limit_exceeded")
OVER_QUOTA = Fault(status=403, type="insufficient_quota", code="insufficient_quota")
NO_QUOTA = Fault(status=503, type="server_error", code="quota_unavailable")
NOT_FOUND = Fault(status=404, type="invalid_request_error", code="not_found")
NO_WEBSOCKET = Fault(status=400, type="invalid_request_error", code="websocket_unsupported")
UNREACHABLE = Fault(status=502, type="upstream_error", code="upstream_unreachable")
BROKEN = Fault(status=502, type="upstream_error", code="upstream_protocol_error")
TIMED_OUT = Fault(status=504, type="upstream_error", code="upstream_timeout")
INTERRUPTED = Fault(status=502, type="upstream_error", code="upstream_stream_interrupted")
SHUTTING_DOWN = Fault(status=503, type="server_error", code="proxy_shutting_down")
NO_MEMORY = Fault(status=503, type="server_error", code="memory_unavailable")
INTERNAL = Fault(status=500, type="server_error", code="internal_error")

FAULTS = (
    BAD_JSON, BAD_VALUE, BAD_ENCODING, TOO_LONG, TOO_LARGE, HEAD_TOO_LARGE, UNKNOWN_KEY, NOT_ALLOWED, NO_MODEL,
    RATE_LIMITED, OVER_QUOTA, NO_QUOTA, NOT_FOUND, NO_WEBSOCKET, UNREACHABLE, BROKEN, TIMED_OUT, INTERRUPTED,
    SHUTTING_DOWN, NO_MEMORY, INTERNAL,
)  # fmt: skip


class StrataError(Exception):
    """A request that Strata answers itself; `param` names the offending field (`"strata.context[2].id"`)."""

    def __init__(
        self, fault: Fault, message: str, *, param: str | None = None, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        super().__init__(message)
        self.headers = headers
        self.fault = fault
        self.message = message
        self.param = param


class Odd(Exception):
    """A valid request that Strata does not understand; `cause` is one of `CAUSES`, a metric label."""

    CAUSES = ("odd_json", "duplicate_key", "no_messages", "odd_message", "plan_failed")

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause
