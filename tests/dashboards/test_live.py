"""The strong test: a real Prometheus reads a real job, and every panel and every rule has something to show."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import start
from tests.dashboards.expressions import ALERTS, BOARDS, RECORDED, filled, panel_queries, selectors
from tests.dashboards.prometheus import Prometheus, Series, configuration, free_ports, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (Debian package prometheus)"),
]
RANKS = 4
STEADY_S = 20
WINDOW = "20s"
TRAINING = Path(__file__).with_name("training.py")


class Run:
    """The job's traces in Prometheus, once all of them are there."""

    def __init__(self, server: Prometheus, began: float) -> None:
        self.server = server
        self.began = began
        self.ended = time.time()

    def panel(self, board: str, title: str) -> list[list[Series]]:
        """What each query of a panel shows."""
        found = [
            self.server.over(filled(target["expr"], "squinchcomm", ".+", WINDOW), self.began, self.ended)
            for name, panel, target in panel_queries()
            if (name, panel) == (board, title)
        ]
        assert found, f"there is no panel {title} in {board}"
        return found

    def of_rank(self, board: str, title: str) -> dict[int, list[float]]:
        """Values of each rank in a panel with one query."""
        (series,) = self.panel(board, title)
        return {int(labels["rank"]): values for labels, values in series}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A job that trains, overflows and fails, watched until both show in alerts."""
    folder = tmp_path_factory.mktemp("live")
    port = free_ports(RANKS + 1)
    job = start("run", "-n", str(RANKS), TRAINING, folder, env={"SQUINCH_METRICS_PORT": str(port), "OMP_NUM_THREADS": "1"})
    try:
        with Prometheus(configuration(folder, port, RANKS), folder / "data", port + RANKS) as server:
            began = time.time()

            def answering() -> bool:
                assert job.poll() is None, job.communicate()[1]
                up = server.get("query", query="count(rate(squinchcomm_residual_norm[10s]) != 0)")["result"]
                return bool(up) and up[0]["value"][1] == str(RANKS)

            wait_for(answering, f"{RANKS} training ranks", 200)
            time.sleep(STEADY_S)
            (folder / "overflow").touch()
            wait_for(lambda: "SquinchcommNonFinite" in server.firing(), "alert of the overflow")
            (folder / "fail").touch()
            wait_for(lambda: "SquinchcommCollectiveFailed" in server.firing(), "alert of the failure")
            time.sleep(5)  # for dashboards to see the alerts as well
            yield Run(server, began)
        (folder / "stop").touch()
        out, err = job.communicate(timeout=120)  # a busy machine takes its time to take torch apart
        assert job.returncode == 0, err
        assert out.count("failed as told") == RANKS
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            try:
                job.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                job.kill()
                job.communicate()


def test_every_panel_has_data(run: Run) -> None:
    empty = []
    for board, title, target in panel_queries():
        for job, instance in (("squinchcomm", ".+"), (".+", r"127\\.0\\.0\\.1:\\d+")):
            if not run.server.over(filled(target["expr"], job, instance, WINDOW), run.began, run.ended):
                empty.append((board, title, target["expr"]))
    assert empty == []


def test_variables_and_annotations_have_data(run: Run) -> None:
    for board in BOARDS.values():
        choices = {}
        for variable in board["templating"]["list"][1:]:
            match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
            assert match is not None
            selector, label = filled(match.group(1), "squinchcomm", ".+", WINDOW), match.group(2)
            choices[variable["name"]] = run.server.get(f"label/{label}/values", **{"match[]": selector})
        assert choices["job"] == ["squinchcomm"]
        assert len(choices["instance"]) == RANKS
        (annotation,) = board["annotations"]["list"]
        assert run.server.over(filled(annotation["expr"], "squinchcomm", ".+", WINDOW), run.began, run.ended)


def test_every_rule_is_evaluated_over_data(run: Run) -> None:
    groups = run.server.get("rules")["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(rules) == set(ALERTS) | set(RECORDED)
    assert {name: rule["lastError"] for name, rule in rules.items() if rule["health"] != "ok"} == {}
    assert [name for name in RECORDED if not run.server.over(name, run.began, run.ended)] == []
    missing = [
        (name, match.group())
        for name, rule in ALERTS.items()
        for match in selectors(rule["expr"])
        if not run.server.over("".join(match.groups("")[:2]), run.began, run.ended)
    ]
    assert missing == [], "alerts look at what is not there"


def test_alerts_fire_where_they_should_and_nowhere_else(run: Run) -> None:
    fired = {labels["alertname"]: labels for labels, _ in run.server.over('ALERTS{alertstate="firing"}', run.began, run.ended)}
    assert set(fired) == {"SquinchcommNonFinite", "SquinchcommCollectiveFailed"}
    assert fired["SquinchcommCollectiveFailed"]["reason"] in ("mismatch", "aborted")


def test_what_is_shown_is_true(run: Run) -> None:
    """Not only data: numbers that are known from how the job was made."""
    ((_, ranks),) = run.panel("overview", "Ranks")[0]
    assert max(ranks) == RANKS
    ((_, ratios),) = run.panel("overview", "Compression")[0]
    assert 4.8 < max(ratios) < 5.34
    (decibels,) = (values for labels, values in run.panel("numerics", "Signal to noise")[0] if labels["codec"] == "squinch6")
    assert all(20 < value < 35 for value in decibels)
    overflowed = run.of_rank("numerics", "Non-finite blocks")
    assert max(overflowed[1]) > 0
    assert all(max(values) > 0 for values in run.of_rank("numerics", "Residuals of error feedback").values())
    reasons = {labels["reason"]: max(values) for labels, values in run.panel("numerics", "Left uncompressed, by reason")[0]}
    assert reasons["small"] > 0
    assert set(reasons) == {"small", "dtype", "op", "lossless", "not_gradient", "crossover"}
    behind = run.of_rank("ranks", "Waits less than the median rank")
    assert max(behind, key=lambda rank: sum(behind[rank])) == 3, "rank 3 is the slow one"
    failures = {labels["reason"]: max(values) for labels, values in run.panel("faults", "Failed calls by reason")[0]}
    assert failures["mismatch"] + failures["aborted"] > 0
    assert failures["timeout"] == failures["corrupt"] == 0
    assert sorted(run.of_rank("ranks", "Who is who")) == list(range(RANKS))
