"""Expressions of dashboards and rules, taken apart far enough to check them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "dashboards"
BOARDS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
RULES: list[dict[str, Any]] = [
    rule
    for path in sorted(FOLDER.glob("*.yml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"]: rule for rule in RULES if "record" in rule}

# A name with or without its matchers: of the exporter, of a recording rule, or Prometheus' own.
_SELECTOR = re.compile(r"(?<![\w:])((?:[a-z_]+:)?squinchcomm_[a-z_]+(?::\w+)?|up|ALERTS)(?![\w:(])\s*(\{[^}]*\})?(\[[^\]]*\])?")


def selectors(expression: str) -> Iterator[re.Match[str]]:
    """Each place that names series: the name, its matchers, its range."""
    return _SELECTOR.finditer(expression)


def panel_queries() -> list[tuple[str, str, dict[str, Any]]]:
    """Dashboard, panel and target of every query."""
    return [
        (name, panel["title"], target)
        for name, board in BOARDS.items()
        for panel in board["panels"]
        for target in panel["targets"]
    ]


def filled(expression: str, job: str, instance: str, window: str) -> str:
    """An expression as Grafana sends it."""
    return expression.replace("$__rate_interval", window).replace("$job", job).replace("$instance", instance)
