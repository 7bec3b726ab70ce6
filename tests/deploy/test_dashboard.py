"""The dashboard is complete, readable and what Grafana accepts; no Grafana is needed to know it."""

import importlib.util
import re
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser

GRID_WIDTH = 24


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return (
        one["x"] < other["x"] + other["w"]
        and other["x"] < one["x"] + one["w"]
        and one["y"] < other["y"] + other["h"]
        and other["y"] < one["y"] + one["h"]
    )


def test_dashboard_keeps_its_address(dashboard: dict[str, Any]) -> None:
    """The dashboard has the title and uid that links point to, and no id of some other Grafana's database."""
    assert dashboard["title"].startswith("Strata · ")
    assert dashboard["uid"] == "strata-" + dashboard["title"].removeprefix("Strata · ").lower().replace(" ", "-")
    assert dashboard.get("id") is None


def test_schema_is_current(dashboard: dict[str, Any]) -> None:
    """The schema version is that of Grafana 12 and 13, so that nothing is migrated at load."""
    assert dashboard["schemaVersion"] == 42


def test_variables_select_tenants_and_models(dashboard: dict[str, Any]) -> None:
    """Tenant and model take several values or all, and the data source can be chosen."""
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}

    assert {"datasource", "tenant", "model"} == variables.keys()
    assert variables["datasource"]["type"] == "datasource"
    for name in ("tenant", "model"):
        variable = variables[name]

        assert (variable["multi"], variable["includeAll"], variable["allValue"]) == (True, True, ".*")
        assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_panel_ids_are_unique(panels: list[dict[str, Any]]) -> None:
    """No two panels share an id: links and the panel's own view go by it."""
    counted = Counter(panel["id"] for panel in panels)

    assert {panel_id: times for panel_id, times in counted.items() if times > 1} == {}


def test_panel_titles_are_unique(panels: list[dict[str, Any]]) -> None:
    """No two panels share a title: the text panel and the descriptions name panels by it."""
    counted = Counter(panel["title"] for panel in panels)

    assert {title: times for title, times in counted.items() if times > 1} == {}


def test_every_chart_asks_the_chosen_data_source(charts: list[dict[str, Any]]) -> None:
    """Every chart and each of its queries follows the data source variable."""
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    asked = [chart["datasource"] for chart in charts] + [t["datasource"] for chart in charts for t in chart["targets"]]

    assert [source for source in asked if source != chosen] == []


def test_every_chart_has_a_unit_and_thresholds(charts: list[dict[str, Any]]) -> None:
    """Every chart says in which unit its numbers are and which of them are good."""
    for chart in charts:
        defaults = chart["fieldConfig"]["defaults"]
        steps = defaults["thresholds"]["steps"]
        bounds = [step["value"] for step in steps[1:]]

        assert defaults["unit"], chart["title"]
        assert steps[0]["value"] is None, chart["title"]
        assert sorted(bounds) == bounds, chart["title"]


def test_every_panel_is_described(panels: list[dict[str, Any]]) -> None:
    """Every panel but a row's heading has a description that is a sentence."""
    described = {panel["title"]: panel.get("description", "") for panel in panels if panel["type"] != "row"}

    assert [title for title, text in described.items() if not text.endswith(".")] == []


def test_text_panel_tells_how_to_read(panels: list[dict[str, Any]]) -> None:
    """There is one text panel, and it names every layer and every source of cached tokens."""
    (text,) = [panel for panel in panels if panel["type"] == "text"]

    for word in ("L1", "L2", "L3", "L4", "L5", "reported", "predicted", "as_sent"):
        assert word in text["options"]["content"]


def test_panels_stand_on_the_grid(dashboard: dict[str, Any]) -> None:
    """No panel leaves the grid and no two overlap."""
    placed = [(panel["title"], panel["gridPos"]) for panel in dashboard["panels"]]

    assert [title for title, pos in placed if pos["x"] < 0 or pos["x"] + pos["w"] > GRID_WIDTH] == []
    assert [(a, b) for (a, one), (b, other) in combinations(placed, 2) if overlap(one, other)] == []


def test_every_query_parses(queries: list[str]) -> None:
    """Every query is PromQL of the right types, and no variable of Grafana's is left in it."""
    for query in queries:
        assert "$" not in query
        promql_parser.parse(query)


def test_no_query_takes_differences_of_a_gauge(queries: list[str]) -> None:
    """A restart is a drop that `increase` and `rate` of a counter know of, and `delta` and `deriv` do not."""
    assert [query for query in queries if re.search(r"\b(i?delta|deriv)\(", query)] == []


def test_query_ids_are_unique(charts: list[dict[str, Any]]) -> None:
    """Within one panel each query has its own letter."""
    for chart in charts:
        letters = [target["refId"] for target in chart["targets"]]

        assert len(set(letters)) == len(letters), chart["title"]


def test_the_files_are_what_the_code_says(root: Path) -> None:
    """`python grafana/build.py` would change nothing."""
    spec = importlib.util.spec_from_file_location("grafana_build", root / "grafana" / "build.py")
    assert spec
    assert spec.loader
    build = importlib.util.module_from_spec(spec)
    sys.modules["grafana_build"] = build
    spec.loader.exec_module(build)
    assert {path.stem for path in (root / "grafana").glob("*.json")} == {each.name for each in build.DASHBOARDS}
    for each in build.DASHBOARDS:
        assert (root / "grafana" / f"{each.name}.json").read_text(encoding="utf-8") == build.text(each)
