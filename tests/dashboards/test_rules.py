"""Recording rules and alerts: named by the rules, tested by Prometheus' own tool, each alert with a runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboards.expressions import ALERTS, FOLDER, RECORDED, RULES, selectors
from tests.dashboards.test_dashboards import exported

ROOT = FOLDER.parent
RULES_TEST = Path(__file__).parent / "rules.test.yml"
FILES = sorted(FOLDER.glob("*.yml"))


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("needs promtool (Debian package prometheus)")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=100, check=False)


def test_promtool_finds_no_fault() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", *FILES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_yaml_is_well_kept() -> None:
    command = [
        sys.executable,
        "-m",
        "yamllint",
        "--strict",
        "--config-file",
        str(ROOT / "deploy" / "yamllint.yml"),
        str(FOLDER),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_give_what_they_should() -> None:
    done = promtool("test", "rules", RULES_TEST)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_seen_firing_and_each_record_measured() -> None:
    tests = yaml.safe_load(RULES_TEST.read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test.get("alert_rule_test", ()) if case["exp_alerts"]}
    assert fired == set(ALERTS)
    measured = {
        match.group(1) for test in tests for case in test.get("promql_expr_test", ()) for match in selectors(case["expr"])
    }
    assert set(RECORDED) <= measured


@pytest.mark.parametrize("record", RECORDED)
def test_records_are_named_level_metric_operations(record: str) -> None:
    level = record.partition(":")[0]
    assert re.fullmatch(r"[a-z_]+:squinchcomm_[a-z_]+:[a-z0-9_]+", record)
    groups = re.findall(r"\bby \(([^)]*)\)", RECORDED[record]["expr"])
    left = {label for label in re.split(r",\s*", groups[0]) if label != "le"}
    assert level == "_".join(label for label in ("job", "instance", "op", "codec", "reason") if label in left)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_rules_ask_for_what_there_is(rule: dict[str, Any]) -> None:
    known = exported() | set(RECORDED) | {"up"}
    found = [match.group(1) for match in selectors(rule["expr"])]
    assert found
    assert set(found) <= known


def test_prometheus_reads_the_relabelling_for_text_files(tmp_path: Path) -> None:
    """docs/operations.md shows what turns the ranks in node_exporter's metrics into instances, as rules need them."""
    (snippet,) = re.findall(r"```yaml\n(metric_relabel_configs:.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.S)
    job = {"job_name": "node", "static_configs": [{"targets": ["127.0.0.1:9100"]}], **yaml.safe_load(snippet)}
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump({"scrape_configs": [job]}))
    done = promtool("check", "config", config)
    assert done.returncode == 0, done.stdout + done.stderr
    instance, name = (
        [";".join(f"{{{label}}}" for label in rule["source_labels"]), rule["regex"]] for rule in job["metric_relabel_configs"]
    )
    labels = {"__name__": "squinchcomm_peers", "instance": "a:9100", "rank": "3"}
    match = re.fullmatch(instance[1], instance[0].format(**labels))
    assert match is not None and match.groups() == ("a:9100", "3")
    assert re.fullmatch(name[1], name[0].format(**labels))
    assert not re.fullmatch(name[1], name[0].format(**labels | {"__name__": "node_load1"}))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_tell_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    assert name.startswith("Squinchcomm")
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor == name.lower()
    assert anchor in anchors(ROOT / page)


def test_runbooks_have_their_parts() -> None:
    sections = re.split(r"^## ", (ROOT / "docs" / "runbooks.md").read_text(), flags=re.M)[1:]
    texts = {section.partition("\n")[0]: section for section in sections}
    assert set(ALERTS) <= set(texts)
    assert {name for name in texts if name.startswith("Squinchcomm")} <= set(ALERTS), "a runbook for no alert"
    for name in ALERTS:
        for part in ("**Means.**", "**Look.**", "**Do.**"):
            assert part in texts[name], f"{name}: {part} is missing"
