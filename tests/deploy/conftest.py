"""The dashboard under test, and its queries as Prometheus would get them."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# Grafana fills these in before it asks Prometheus; longest names first, since one is the start of another.
FILLED_IN = {"$__rate_interval": "1m", "$__range": "6h", "$tenant": ".*", "$model": ".*"}


@pytest.fixture
def root() -> Path:
    return ROOT


NAMES = ("savings", "cache-health", "budget", "operations")


@pytest.fixture(params=NAMES)
def dashboard(root: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((root / "grafana" / f"{request.param}.json").read_bytes())
    return loaded


@pytest.fixture
def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [*dashboard["panels"], *(inner for panel in dashboard["panels"] for inner in panel.get("panels", []))]


@pytest.fixture
def charts(panels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All panels that show data: neither the rows nor the text."""
    return [panel for panel in panels if panel["type"] not in {"row", "text"}]


@pytest.fixture
def queries(dashboard: dict[str, Any], charts: list[dict[str, Any]]) -> list[str]:
    """Every selector and expression the dashboard sends, those of its variables included."""
    found = [target["expr"] for chart in charts for target in chart["targets"]]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found.append(variable["query"]["query"].removeprefix("label_values(").rpartition(",")[0])
    for name, value in FILLED_IN.items():
        found = [query.replace(name, value) for query in found]
    return found
