"""Every provider's dialect of usage."""

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.usage import Usage, parse


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        pytest.param(
            {"usage": {"prompt_tokens": 10, "completion_tokens": 5}},
            Usage(input_tokens=10, output_tokens=5),
            id="OpenAI without details: not reported is not 0",
        ),
        pytest.param(
            {
                "usage": {
                    "prompt_tokens": 10,
                    "completion_tokens": 5,
                    "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
                    "completion_tokens_details": {"reasoning_tokens": 3},
                }
            },
            Usage(input_tokens=10, output_tokens=5, cache_read_tokens=4, reasoning_tokens=3),
            id="OpenAI",
        ),
        pytest.param(
            {"usage": {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}}},
            Usage(input_tokens=10, cache_read_tokens=0),
            id="a reported 0",
        ),
        pytest.param(
            {"usage": {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6}}},
            Usage(input_tokens=10, cache_read_tokens=4, cache_write_tokens=6),
            id="writes",
        ),
        pytest.param(
            {"usage": {"prompt_tokens": 10, "prompt_cache_hit_tokens": 4, "prompt_cache_miss_tokens": 6}},
            Usage(input_tokens=10, cache_read_tokens=4),
            id="DeepSeek",
        ),
        pytest.param(
            {"usage": {"prompt_tokens": 10, "cached_tokens": 4}}, Usage(input_tokens=10, cache_read_tokens=4), id="flat"
        ),
        pytest.param(
            {"usage": {"input_tokens": 10, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 4}}},
            Usage(input_tokens=10, output_tokens=5, cache_read_tokens=4),
            id="OpenAI Responses: cached tokens are inside",
        ),
        pytest.param(
            {
                "usage": {
                    "input_tokens": 10,
                    "output_tokens": 5,
                    "cache_read_input_tokens": 100,
                    "cache_creation_input_tokens": 7,
                }
            },
            Usage(input_tokens=117, output_tokens=5, cache_read_tokens=100, cache_write_tokens=7),
            id="Anthropic: cached tokens are beside",
        ),
        pytest.param(
            {"usage": {"input_tokens": 10, "output_tokens": 5}},
            Usage(input_tokens=10, output_tokens=5),
            id="Anthropic without a cache",
        ),
        pytest.param(
            {"usage": {"prompt_tokens": 117, "completion_tokens": 5, "cache_read_input_tokens": 100}},
            Usage(input_tokens=117, output_tokens=5, cache_read_tokens=100),
            id="Anthropic through a translating gateway",
        ),
        pytest.param(
            {
                "usage": {
                    "prompt_tokens": 1_000,
                    "prompt_tokens_details": {"cached_tokens": 0},
                    "cache_creation_input_tokens": 900,
                }
            },
            Usage(input_tokens=1_000, cache_read_tokens=0, cache_write_tokens=900),
            id="Anthropic's writes through a gateway",
        ),
        pytest.param(
            {"usage": {"prompt_tokens": 1_000, "prompt_tokens_details": {"cache_creation_tokens": 900}}},
            Usage(input_tokens=1_000, cache_write_tokens=900),
            id="and by LiteLLM's name",
        ),
        pytest.param(
            {"usage": {"prompt_tokens": 200, "cache_read_input_tokens": 800, "cache_creation_input_tokens": 50}},
            Usage(input_tokens=1_050, cache_read_tokens=800, cache_write_tokens=50),
            id="a gateway that counts cached tokens beside the prompt",
        ),
        pytest.param(
            {"usage": {"prompt_tokens": 200, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 800}},
            Usage(input_tokens=1_000, cache_read_tokens=0, cache_write_tokens=800),
            id="and written ones",
        ),
        pytest.param(
            {"usage": {"prompt_tokens": 10.0, "completion_tokens": 2.5, "cached_tokens": 4.0}},
            Usage(input_tokens=10, cache_read_tokens=4),
            id="whole numbers with a point",
        ),
        pytest.param(
            {"usage": {"prompt_tokens": 10, "completion_tokens": 10**12 + 1, "cached_tokens": 1e300}},
            Usage(input_tokens=10),
            id="more than anything holds",
        ),
        pytest.param({"usage": {"prompt_tokens": 1e13}}, None, id="a prompt larger than any"),
        pytest.param(
            {"timings": {"cache_n": 90, "prompt_n": 10, "predicted_n": 5}},
            Usage(input_tokens=100, output_tokens=5, cache_read_tokens=90),
            id="llama.cpp's timings alone",
        ),
        pytest.param(
            {"usage": {"prompt_tokens": 100, "completion_tokens": 5}, "timings": {"cache_n": 90, "prompt_n": 10}},
            Usage(input_tokens=100, output_tokens=5, cache_read_tokens=90),
            id="llama.cpp",
        ),
        pytest.param(
            {"usage": {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 40}}},
            Usage(input_tokens=10, cache_read_tokens=10),
            id="more cached than there is",
        ),
        pytest.param({"usage": None}, None, id="null"),
        pytest.param({}, None, id="nothing"),
        pytest.param({"usage": {"completion_tokens": 5}}, None, id="no word of the input"),
        pytest.param({"usage": {"prompt_tokens": -1}}, None, id="a negative number"),
        pytest.param({"usage": {"prompt_tokens": True}}, None, id="a boolean"),
        pytest.param({"usage": {"prompt_tokens": "10"}}, None, id="a string"),
        pytest.param({"usage": {"input_tokens": "10"}}, None, id="a string, in the other dialect"),
        pytest.param({"usage": [1]}, None, id="a list"),
        pytest.param({"timings": {"cache_n": 90}}, None, id="half of the timings"),
        pytest.param(
            {"usage": {"prompt_tokens": 10, "prompt_tokens_details": [1], "completion_tokens": None}},
            Usage(input_tokens=10),
            id="details that are none",
        ),
    ],
)
def test_a_dialect_is_read(answer: object, usage: Usage | None) -> None:
    """What a provider says, in one form."""
    assert parse(orjson.dumps(answer)) == usage


@pytest.mark.parametrize("raw", [b"", b"{", b"[DONE]", b"5", b'{"usage":' + b"[" * 100_000, b"\xff"])
def test_what_cannot_be_read_says_nothing(raw: bytes) -> None:
    """No answer of an upstream makes the reader raise."""
    assert parse(raw) is None


NUMBERS = st.none() | st.booleans() | st.integers(-5, 10**25) | st.floats() | st.text(max_size=2)
FIELDS = [
    "prompt_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details", "input_tokens",
    "output_tokens", "input_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens",
    "prompt_cache_hit_tokens", "cached_tokens", "cache_write_tokens", "reasoning_tokens",
]  # fmt: skip
VALUES = NUMBERS | st.dictionaries(st.sampled_from(FIELDS), NUMBERS, max_size=3) | st.lists(NUMBERS, max_size=2)


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {"usage": st.none() | VALUES | st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6)},
        optional={
            "timings": st.none()
            | VALUES
            | st.dictionaries(st.sampled_from(["cache_n", "prompt_n", "predicted_n"]), NUMBERS)
        },
    )
)
def test_whatever_is_reported_the_hit_ratio_is_at_most_one(answer: dict[str, object]) -> None:
    """It never raises, counts nothing negative, and never reads more from cache than was sent."""
    usage = parse(json.dumps(answer).encode())
    if usage is not None:
        assert usage.input_tokens >= 0
        assert 0 <= (usage.cache_read_tokens or 0) <= usage.input_tokens
        assert min(usage.output_tokens or 0, usage.cache_write_tokens or 0, usage.reasoning_tokens or 0) >= 0
