"""Errors as OpenAI words and shapes them: ``{"error": {"message", "type", "param", "code"}}``."""

from dataclasses import dataclass, field

_KNOWN = {
    401: ("invalid_request_error", "invalid_api_key", "Incorrect API key provided."),
    403: (
        "invalid_request_error",
        "unsupported_country_region_territory",
        "Country, region, or territory not supported",
    ),
    404: ("invalid_request_error", "model_not_found", "The model does not exist or you do not have access to it."),
    429: ("requests", "rate_limit_exceeded", "Rate limit reached for requests. Please try again in 1s."),
    500: ("server_error", None, "The server had an error while processing your request. Sorry about that!"),
    503: ("server_error", None, "The engine is currently overloaded, please try again later"),
}


@dataclass(kw_only=True, eq=False)
class Refusal(Exception):
    """The provider answers an error; not frozen, because Python sets an exception's traceback."""

    message: str
    status: int = 400
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Exception.__init__(self, f"{self.status} {self.message}")

    @property
    def body(self) -> dict[str, object]:
        """JSON of the response."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def of_status(status: int, headers: dict[str, str] | None = None) -> Refusal:
    """Return the error a provider typically sends with this status."""
    kind, code, message = _KNOWN.get(
        status,
        ("server_error" if status >= 500 else "invalid_request_error", None, f"Simulated error with status {status}."),
    )
    return Refusal(status=status, type=kind, code=code, message=message, headers=headers or {})


def bad_key(key: str) -> Refusal:
    """401 for a missing or an unknown API key; shows only the key's end."""
    if not key:
        message = (
            "You didn't provide an API key. You need to provide your API key in an Authorization header using Bearer "
            "auth (i.e. Authorization: Bearer YOUR_KEY)."
        )
        return Refusal(status=401, message=message)
    message = (
        f"Incorrect API key provided: {'*' * 8}{key[-4:] if len(key) > 8 else ''}. "
        "You can find your API key at https://platform.openai.com/account/api-keys."
    )
    return Refusal(status=401, code="invalid_api_key", message=message)


def unknown_model(model: str) -> Refusal:
    """404 for a model that is not served."""
    return Refusal(
        status=404,
        code="model_not_found",
        param="model",
        message=f"The model '{model}' does not exist or you do not have access to it.",
    )


def unknown_url(method: str, path: str) -> Refusal:
    """404 for a path that is not served."""
    return Refusal(status=404, message=f"Invalid URL ({method} {path})")


def too_long(*, limit: int, messages: int, functions: int, completion: int, param: str = "messages") -> Refusal:
    """400 for a prompt that, with the asked-for reply, exceeds the context window; all arguments are tokens."""
    prompt = messages + functions
    parts = [f"{messages} in the messages"]
    if functions:
        parts.append(f"{functions} in the functions")
    if prompt > limit:
        said = f"your messages resulted in {prompt} tokens"
        said += f" ({', '.join(parts)})" if functions else ""
        remedy = "messages or functions" if functions else "messages"
    else:
        parts.append(f"{completion} in the completion")
        said = f"you requested {prompt + completion} tokens ({', '.join(parts)})"
        remedy = "messages, functions, or completion" if functions else "messages or completion"
    return Refusal(
        code="context_length_exceeded",
        param=param,
        message=(
            f"This model's maximum context length is {limit} tokens. However, {said}. "
            f"Please reduce the length of the {remedy}."
        ),
    )
