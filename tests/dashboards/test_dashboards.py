"""Dashboards keep the rules that Grafana and its users expect of them."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

import pytest

from dashboards.__main__ import files
from squinchcomm import metrics
from tests.dashboards.expressions import BOARDS, RULES, panel_queries, selectors

_COUNTER = re.compile(r"_(total|bucket|sum|count)$")
_PROMETHEUS_OWN = {"up", "ALERTS"}

each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=list(BOARDS))


def exported() -> set[str]:
    """Names of all series that the exporter can have."""
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {family.name + ending for family in metrics.registry().collect() for ending in endings[family.type]}


def test_the_files_are_what_their_source_makes() -> None:
    assert {path.stem for path in files()} == set(BOARDS) == {"overview", "ranks", "numerics", "faults"}
    for path, text in files().items():
        assert path.read_text() == text, f"{path.name} is not up to date: python -m dashboards"


def test_identities() -> None:
    assert len({board["uid"] for board in BOARDS.values()}) == len({board["title"] for board in BOARDS.values()}) == len(BOARDS)
    for board in BOARDS.values():
        assert board["id"] is None
        assert re.fullmatch(r"[a-z-]{1,40}", board["uid"])


@each_board
def test_variables(board: dict[str, Any]) -> None:
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance"]
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    for name in ("job", "instance"):
        assert variables[name]["datasource"]["uid"] == "$datasource"
        assert variables[name]["multi"] and variables[name]["includeAll"]


@each_board
def test_panels_say_what_they_show(board: dict[str, Any]) -> None:
    titles = [panel["title"] for panel in board["panels"]]
    assert len(titles) == len(set(titles)) >= 5
    assert len({panel["id"] for panel in board["panels"]}) == len(titles)
    for panel in board["panels"]:
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for source in (panel, *panel["targets"]):
            assert source["datasource"] == {"type": "prometheus", "uid": "$datasource"}


@each_board
def test_panels_do_not_overlap(board: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, two in combinations(places, 2):
        apart = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"], (one, two)


@pytest.mark.parametrize(("board", "title", "target"), panel_queries())
def test_queries(board: str, title: str, target: dict[str, Any]) -> None:
    names, expression = exported() | _PROMETHEUS_OWN, target["expr"]
    found = list(selectors(expression))
    assert found, expression
    for match in found:
        name, matchers, window = match.groups()
        before = expression[: match.start()]
        assert name in names, f"{name} is not exported"
        assert 'job=~"$job"' in matchers
        assert name == "ALERTS" or 'instance=~"$instance"' in matchers
        if _COUNTER.search(name):
            assert re.search(r"\b(rate|irate|increase)\($", before), f"{name} is a counter"
            assert window == "[$__rate_interval]"
        else:
            assert window is None
    assert not re.search(r"\[(?!\$__rate_interval\])", expression)
    labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    joined = {"rank"} if "group_left (rank)" in expression else set()
    kept = {label for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in re.split(r",\s*", group)}
    assert labels <= kept | joined | {"codec", "instance"}, "a label of the legend is summed away"


def test_every_metric_is_looked_at() -> None:
    """A metric that no panel and no rule asks for is one that nobody would miss."""
    expressions = [target["expr"] for _, _, target in panel_queries()] + [rule["expr"] for rule in RULES]
    used = {match.group(1) for expression in expressions for match in selectors(expression)}
    unused = {name for name in exported() - used if not name.endswith("_count")}
    assert unused <= {"squinchcomm_unshared_payloads_total"}, unused
