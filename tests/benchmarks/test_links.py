"""The link benchmark: its arithmetic, its namespaces, and that it leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import links
import links_report
import netns
import numpy as np
import pytest
from links_rank import Rank

SCRIPT = Path(links.__file__)
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
GOOD = {"square_error": 0.0, "square_sum": 1.0, "worst": 0.0, "checksum": 7}


def answers(times: dict[str, list[list[float]]]) -> list[dict[str, dict[str, list[float]]]]:
    ranks = len(next(iter(times.values())))
    return [
        {
            "starts": {name: [0.0] * len(each[rank]) for name, each in times.items()},
            "times": {name: each[rank] for name, each in times.items()},
            "sent": {name: [0] for name in times},
        }
        for rank in range(ranks)
    ]


def test_a_row_takes_the_slowest_rank_and_pairs_repeats() -> None:
    times = {"gloo-f32": [[4.0, 9.0, 1.0], [5.0, 6.0, 2.0]], "squinch6": [[1.0, 3.0, 0.1], [0.5, 1.0, 0.5]]}
    base, ours = links_report.rows("1Gbit", 1e9, 10**9, answers(times), [dict.fromkeys(times, GOOD)] * 2)
    assert base.raw_s == [5.0, 9.0, 2.0]
    assert base.time_s == 5.0
    assert base.limit_s == 8.0  # two ranks: half the array out, half of it in
    assert base.algbw == base.busbw == 10**9 / 5.0
    assert ours.speedup["gloo-f32"][0] == 4.0  # of 5, 3 and 4
    assert base.speedup == {}


def test_a_rank_that_comes_late_costs_the_others_nothing() -> None:
    early, late = answers({"none": [[3.0], [1.0]]})
    early["starts"]["none"], late["starts"]["none"] = [10.0], [12.0]
    (row,) = links_report.rows("1Gbit", 1e9, 64, [early, late], [{"none": GOOD}] * 2)
    assert row.raw_s == [1.0]


@pytest.mark.parametrize(
    "checks",
    [
        [GOOD, GOOD | {"checksum": 8}],
        [GOOD, GOOD | {"worst": 0.3}],
        [GOOD, GOOD | {"square_error": 0.5}],
    ],
)
def test_wrong_data_is_seen(checks: list[dict[str, float]]) -> None:
    (row,) = links_report.rows(
        "1Gbit", 1e9, 64, answers({"squinch6": [[1.0], [1.0]]}), [{"squinch6": check} for check in checks]
    )
    assert not row.ok
    assert "FAILED" in links_report.footer([row], {})[-1]


def test_the_oracle_takes_the_exact_sum_only() -> None:
    rank = Rank(rank=0, world_size=2, host="", gloo="", squinch="", interface="")
    rank.load(count=3000)
    other = Rank(rank=1, world_size=2, host="", gloo="", squinch="", interface="")
    other.load(count=3000)
    right = rank.input + other.input
    assert rank._check(right)["worst"] < 1e-6
    right[2999] += 0.5
    assert rank._check(right)["worst"] > 0.05
    assert np.sqrt(rank._check(rank.input)["square_error"] / rank._check(rank.input)["square_sum"]) > 0.5


def ours_in(listing: str, pid: int) -> list[str]:
    return [line for line in listing.splitlines() if line.startswith(f"sq{pid}-")]


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.root
def test_namespaces_go_away_after_a_failure() -> None:
    if reason := netns.available():
        pytest.skip(reason)
    with pytest.raises(ZeroDivisionError), netns.Network(2) as network:  # noqa: PT012 - the network's end is what is tested
        assert len(ours_in(namespaces(), os.getpid())) == 3
        network.shape(1e8)
        network.shape(None)
        network.shape(None)
        raise ZeroDivisionError
    assert ours_in(namespaces(), os.getpid()) == []


@pytest.mark.root
@needs_torch
def test_a_shaped_link_is_as_slow_as_asked(tmp_path: Path) -> None:
    if reason := netns.available():
        pytest.skip(reason)
    options = [
        "--ranks",
        "2",
        "--links",
        "0.1Gbit",
        "--sizes",
        "1M",
        "--contenders",
        "gloo-f32",
        "--no-extras",
        "--budget",
        "1",
    ]
    command = [sys.executable, str(SCRIPT), *options, "-J", str(tmp_path / "raw.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads((tmp_path / "raw.json").read_text())["rows"]
    assert 0.9 * row["limit_s"] < row["time_s"] < 3 * row["limit_s"]
    assert 1 << 20 < row["sent_bytes"] < 1.2 * (1 << 20)


@pytest.mark.root
@needs_torch
def test_a_terminated_run_leaves_nothing(tmp_path: Path) -> None:
    if reason := netns.available():
        pytest.skip(reason)
    options = ["--ranks", "2", "--links", "0.1Gbit", "--sizes", "16M", "--contenders", "gloo-f32", "--budget", "60"]
    process = subprocess.Popen([sys.executable, str(SCRIPT), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while len(ours_in(namespaces(), process.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(ours_in(namespaces(), process.pid)) == 3
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert ours_in(namespaces(), process.pid) == []
    children = subprocess.run(["pgrep", "-f", f'"host": "sq{process.pid}-'], capture_output=True, text=True, check=False)
    assert children.stdout == ""
