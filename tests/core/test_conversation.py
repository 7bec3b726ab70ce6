"""Which conversation a request names."""

from collections.abc import Callable

import pytest

from proxy.core.conversation import HEADER, METADATA, Name, name
from proxy.core.request import Request
from proxy.errors import StrataError

Read = Callable[[object], Request]


def named(request: Request, **headers: str) -> Name | None:
    return name(
        request,
        {key.replace("_", "-"): value for key, value in headers.items()},
        id_headers=["x-session-id", "x-chat-id"],
        user_headers=["x-user-id", "x-other-id"],
    )


@pytest.mark.parametrize(
    ("body", "headers", "found"),
    [
        pytest.param({}, {}, None, id="nothing said"),
        pytest.param({}, {"x_strata_conversation": "c"}, Name("c", ""), id="our header"),
        pytest.param({"strata": {"conversation": "b"}}, {}, Name("b", ""), id="our member"),
        pytest.param({}, {"x_session_id": "s"}, Name("s", ""), id="a configured header"),
        pytest.param({}, {"x_chat_id": "t", "x_session_id": "s"}, Name("s", ""), id="the first configured one"),
        pytest.param({}, {"x_session": "s"}, None, id="another header"),
        pytest.param({"metadata": {"chat_id": "m"}}, {}, Name("m", ""), id="metadata"),
        pytest.param(
            {"metadata": {"chat_id": "m", "session_id": "n", "conversation_id": "o"}}, {}, Name("o", ""), id="in order"
        ),
        pytest.param({"metadata": {"chat_id": 5}}, {}, None, id="metadata no string"),
        pytest.param(
            {"strata": {"conversation": "b"}, "metadata": {"chat_id": "m"}},
            {"x_strata_conversation": "c", "x_session_id": "s"},
            Name("c", ""),
            id="our header wins",
        ),
        pytest.param(
            {"strata": {"conversation": "b"}, "metadata": {"chat_id": "m"}},
            {"x_session_id": "s"},
            Name("b", ""),
            id="then our member",
        ),
        pytest.param({"metadata": {"chat_id": "m"}}, {"x_session_id": "s"}, Name("s", ""), id="then headers"),
        pytest.param({"metadata": {"chat_id": "m"}}, {"x_session_id": ""}, Name("m", ""), id="an empty one is none"),
        pytest.param({"metadata": {"chat_id": "m"}}, {"x_session_id": "s" * 513}, Name("m", ""), id="too long is none"),
        pytest.param({}, {"x_session_id": "s" * 512}, Name("s" * 512, ""), id="as long as allowed"),
        pytest.param({"user": "u", "prompt_cache_key": "k"}, {}, None, id="neither user nor prompt_cache_key"),
        pytest.param({"user": "u"}, {"x_session_id": "s"}, Name("s", "u"), id="the user separates"),
        pytest.param(
            {"user": "u", "safety_identifier": "i"}, {"x_session_id": "s"}, Name("s", "i"), id="safety identifier"
        ),
        pytest.param({"user": "u"}, {"x_session_id": "s", "x_user_id": "h"}, Name("s", "h"), id="a user header"),
        pytest.param(
            {}, {"x_session_id": "s", "x_user_id": "", "x_other_id": "h"}, Name("s", "h"), id="an empty user header"
        ),
    ],
)
def test_a_conversation_is_named_by_the_client_alone(
    body: dict[str, object], headers: dict[str, str], found: Name | None, read: Read
) -> None:
    """The order of places, and what names nothing."""
    request = read({"messages": [{"role": "user", "content": "conversation c"}], **body})
    assert named(request, **headers) == found


def test_our_own_header_is_refused_when_too_long(read: Read) -> None:
    """It is for the proxy alone, so nobody else would tell the client."""
    with pytest.raises(StrataError) as caught:
        named(read({"messages": []}), x_strata_conversation="c" * 513)
    assert (caught.value.fault.code, caught.value.param) == ("invalid_value", HEADER)
    assert "512" in caught.value.message
    assert "513" in caught.value.message


def test_metadata_names_are_the_published_ones() -> None:
    """The list of DESIGN section 5."""
    assert METADATA == ("conversation_id", "session_id", "thread_id", "chat_id")
