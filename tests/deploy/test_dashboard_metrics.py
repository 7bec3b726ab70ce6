"""The dashboard asks only for metrics that Strata documents."""

import re

import promql_parser

from proxy.observe.metrics import DOCUMENTED

SERIES_OF_A_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


def metrics_of(query: str) -> set[str]:
    names: set[str] = set()

    def note(expr: promql_parser.Expr) -> None:
        if isinstance(expr, promql_parser.VectorSelector) and expr.name:
            names.add(expr.name)
        elif isinstance(expr, promql_parser.MatrixSelector) and expr.vector_selector.name:
            names.add(expr.vector_selector.name)

    promql_parser.walk(promql_parser.parse(query), note)
    return names


def test_every_query_names_a_metric(queries: list[str]) -> None:
    """No query is made of numbers alone, so the next test leaves none out."""
    assert [query for query in queries if not metrics_of(query)] == []


def test_every_metric_is_documented(queries: list[str]) -> None:
    """Every metric that a panel or a variable names is one that Strata exposes, a histogram by its base name."""
    asked = set().union(*(metrics_of(query) for query in queries))
    known = {name if name in DOCUMENTED else SERIES_OF_A_HISTOGRAM.sub("", name) for name in asked}

    assert set() == known - set(DOCUMENTED)
