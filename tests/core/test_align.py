"""Lines of two prompts, laid side by side."""

import pytest

from proxy.core.align import Gap, align, gaps


@pytest.mark.parametrize(
    ("want", "have", "match"),
    [
        ("abc", "abc", [0, 1, 2]),
        ("abc", "xabc", [-1, 0, 1, 2]),
        ("abc", "ac", [0, 2]),
        ("", "ab", [-1, -1]),
        ("abcd", "axyd", [0, -1, -1, 3]),
        ("aab", "ab", [0, 2]),
    ],
)
def test_lines_are_found_in_order(want: str, have: str, match: list[int]) -> None:
    """Each of the request's lines at its place in the template, or nowhere."""
    assert align([key.encode() for key in want], [key.encode() for key in have]) == match


@pytest.mark.parametrize(
    ("match", "count", "also", "found"),
    [
        pytest.param([0, 1, 2], 3, (), [], id="nothing differs"),
        pytest.param([0, -1, -1, 3], 4, (), [Gap(1, 3, 1, 3)], id="some gone, some new"),
        pytest.param([0, 2], 3, (), [Gap(1, 2, 1, 1)], id="gone"),
        pytest.param([-1, 0], 1, (), [Gap(0, 0, 0, 1)], id="new in front"),
        pytest.param([0, -1], 1, (), [Gap(1, 1, 1, 2)], id="new at the end"),
        pytest.param([0, 1], 2, {1}, [Gap(1, 1, 1, 1)], id="nothing, at a place that was asked for"),
    ],
)
def test_gaps_are_what_lies_between_common_lines(
    match: list[int], count: int, also: set[int] | tuple[()], found: list[Gap]
) -> None:
    """What is gone and what is new; where neither is, only at the places asked for."""
    assert [*gaps(match, count, also)] == found
