"""What is known of models."""

from typing import Any

import pytest

from proxy.core.models import KNOWN, OTHER, describe


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("gpt-4o", "gpt-4o"),
        ("gpt-4o-2024-11-20", "gpt-4o"),
        ("gpt-4o-mini-2024-07-18", "gpt-4o-mini"),
        ("openai/gpt-4o", "gpt-4o"),
        ("GPT-4o", "gpt-4o"),
        ("gpt-4-0613", "gpt-4"),
        ("gpt-4-turbo-2024-04-09", "gpt-4-turbo"),
        ("gpt-5.1-codex", "gpt-5.1"),
        ("gpt-5", "gpt-5"),
        ("gpt-5-mini", "gpt-5-mini"),
        ("accounts/x/models/kimi-k3", "kimi-k3"),
        ("claude-sonnet-4-5@20250929", "claude-sonnet-4-5"),
        ("gpt-oss-20b:latest", "gpt-oss-20b"),
        ("llama-3", OTHER),
        ("gpt-4ofoo", OTHER),
        ("", OTHER),
    ],
)
def test_a_model_is_known_by_its_family_name(name: str, label: str) -> None:
    """Prefixes, dates and tags do not matter; the longest known name wins; everything else is `other`."""
    assert describe(name).name == label


def test_every_known_model_describes_itself() -> None:
    """No name of the table is hidden by another."""
    assert all(describe(name) is model for name, model in KNOWN.items())


def test_an_unknown_model_gets_a_guess_that_says_so() -> None:
    """Counts are inexact, and no window is assumed, so nothing is ever cut for one."""
    found = describe("someone/llama-3")
    assert (found.exact, found.window, found.largest_input, found.encoding) == (False, None, None, "o200k_base")


def test_a_new_model_of_a_known_family_is_counted_exactly() -> None:
    """Its tokenizer is known and its window is not."""
    found = describe("gpt-5.9-preview")
    assert (found.name, found.exact, found.window) == (OTHER, True, None)


@pytest.mark.parametrize(
    ("name", "window"),
    [
        pytest.param("gpt-4-1106-preview", 128_000, id="gpt-4-1106-preview"),
        pytest.param("gpt-4-0125-preview", 128_000, id="gpt-4-0125-preview"),
        pytest.param("gpt-4-vision-preview", 128_000, id="gpt-4-vision-preview"),
        pytest.param("gpt-4-32k", 32_768, id="gpt-4-32k"),
    ],
)
def test_no_window_is_smaller_than_the_truth(name: str, window: int) -> None:
    """A model whose window is larger than its namesake's is never cut to the namesake's."""
    found = describe(name)
    assert found.window is None or found.window >= window


@pytest.mark.parametrize(
    ("name", "encoding"), [("gpt-4", "cl100k_base"), ("gpt-3.5-turbo-0125", "cl100k_base"), ("o3", "o200k_base")]
)
def test_the_tokenizer_is_known(name: str, encoding: str) -> None:
    """Old models count with the old vocabulary, exactly."""
    assert (describe(name).encoding, describe(name).exact) == (encoding, True)


@pytest.mark.parametrize(
    ("name", "how", "window"),
    [
        ("claude-sonnet-4-5", {"beta": "a-2025-01-01, context-1m-2025-08-07"}, 1_000_000),
        ("anthropic/claude-sonnet-4-5@20250929", {"beta": "context-1m-2025-08-07"}, 1_000_000),
        ("claude-sonnet-4-5", {"beta": "interleaved-thinking-2025-05-14"}, 200_000),
        ("claude-haiku-4-5", {"beta": "context-1m-2025-08-07"}, 200_000),
        ("claude-sonnet-4-5", {"beta": "context-1m-2025-08-07", "windows": {"claude-sonnet-4-5": 9_000}}, 9_000),
    ],
)
def test_a_request_may_ask_for_a_longer_window(name: str, how: dict[str, Any], window: int | None) -> None:
    """Where its model has one; what settings say comes first."""
    assert describe(name, **how).window == window
