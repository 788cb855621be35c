"""Panels and dashboards as Grafana's JSON has them, with only what these dashboards need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "$datasource"}
TAG = "squinchcomm"
_GRID_WIDTH = 24


@dataclass(frozen=True)
class Query:
    """An expression, and what its series are called: text with labels as `{{label}}`."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: A few words.
        description: What is shown and how to read it.
        unit: Grafana's name of the unit.
        queries: What is drawn.
        kind: "timeseries", "stat" or "table".
        stacked: Draw series on top of each other: their sum means something.
        bad_from: Value from which a stat turns red.
        hidden: Labels that a table leaves out.
    """

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    stacked: bool = False
    bad_from: float | None = None
    hidden: tuple[str, ...] = ()

    def render(self, number: int, place: dict[str, int]) -> dict[str, Any]:
        """The panel's JSON at a place of the grid."""
        instant = self.kind == "table"
        look = {"timeseries": self._timeseries, "stat": self._stat, "table": self._table}[self.kind]
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": place,
            "targets": [
                {
                    "refId": chr(ord("A") + index),
                    "datasource": DATASOURCE,
                    "editorMode": "code",
                    "expr": query.expression,
                    "legendFormat": query.legend,
                    "format": "table" if instant else "time_series",
                    "instant": instant,
                    "range": not instant,
                }
                for index, query in enumerate(self.queries)
            ],
            **look(),
        }

    def _timeseries(self) -> dict[str, Any]:
        custom = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if self.stacked else 8,
            "showPoints": "never",
            "spanNulls": 600_000,  # ms; what is sampled once in a while stays a line
            "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
        }
        legend = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["mean", "max", "lastNotNull"]}
        return {
            "fieldConfig": self._fields({"min": 0, "custom": custom}),
            "options": {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}},
        }

    def _stat(self) -> dict[str, Any]:
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        if self.bad_from is not None:
            steps.append({"color": "red", "value": self.bad_from})
        return {
            "fieldConfig": self._fields({"thresholds": {"mode": "absolute", "steps": steps}}),
            "options": {
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "colorMode": "value",
                "graphMode": "area",
                "textMode": "auto",
            },
        }

    def _table(self) -> dict[str, Any]:
        excluded = dict.fromkeys(("Time", "Value", "__name__", *self.hidden), True)
        return {
            "fieldConfig": self._fields({}),
            "options": {"showHeader": True, "cellHeight": "sm"},
            "transformations": [{"id": "organize", "options": {"excludeByName": excluded}}],
        }

    def _fields(self, more: dict[str, Any]) -> dict[str, Any]:
        return {"defaults": {"unit": self.unit, "noValue": "none", **more}, "overrides": []}


@dataclass(frozen=True)
class Row:
    """Panels side by side, of equal widths and one height in grid units."""

    height: int
    panels: tuple[Panel, ...]


def dashboard(name: str, description: str, rows: Sequence[Row]) -> dict[str, Any]:
    """A dashboard's JSON; its uid is made of the name."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        width = _GRID_WIDTH // len(row.panels)
        for column, panel in enumerate(row.panels):
            place = {"x": column * width, "y": top, "w": width, "h": row.height}
            panels.append(panel.render(len(panels) + 1, place))
        top += row.height
    return {
        "id": None,
        "uid": f"{TAG}-{name.lower()}",
        "title": f"{TAG}: {name}",
        "description": description,
        "tags": [TAG],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair through all panels
        "refresh": "15s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "",
        "links": [_links()],
        "annotations": {"list": [_alerts()]},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _links() -> dict[str, Any]:
    """The way to the other dashboards, with the same jobs, instances and time."""
    return {
        "type": "dashboards",
        "title": TAG,
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Squinchcomm.*", alertstate="firing", job=~"$job"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}} {{reason}}",
        "step": "15s",
    }


def _variables() -> list[dict[str, Any]]:
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
        "multi": False,
        "includeAll": False,
        "current": {},
        "options": [],
        "regex": "",
    }
    job = _choice("job", "Job", "label_values(squinchcomm_build_info, job)")
    return [source, job, _choice("instance", "Instance", 'label_values(squinchcomm_build_info{job=~"$job"}, instance)')]


def _choice(name: str, label: str, query: str) -> dict[str, Any]:
    """A variable of any number of values; all of them at first."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 3,
        "hide": 0,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
        "options": [],
        "regex": "",
    }
