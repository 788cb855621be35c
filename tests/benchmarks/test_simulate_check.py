"""The check of the cost model: its fit, what it compares with what, and a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import links_report
import netns
import numpy as np
import pytest
import simulate_check

from squinchcomm.cost import DIRECT, HIERARCHICAL, PAIRWISE
from squinchcomm.machine import Machine, codec_cost

CODECS = {name: codec_cost(name) for name in ("none", "squinch6")}
DEMANDS = np.array([[1.0, frames, size] for frames in (1, 3, 7) for size in (0.0, 1e5, 3e7)])


def measured(contender: str, size: int, ranks: int, hosts: int) -> links_report.Row:
    answers = [
        {"starts": {contender: [0.0] * 3}, "times": {contender: [0.010, 0.030, 0.020]}, "sent": {contender: [0]}}
        for _ in range(ranks)
    ]
    good = {contender: {"square_error": 0.0, "square_sum": 1.0, "worst": 0.0, "checksum": 7}}
    (row,) = links_report.rows("1Gbit", 1e9, size, answers, [good] * ranks, hosts)
    return row


def test_the_fit_finds_the_costs() -> None:
    costs = [20e-6, 80e-6, 1e-9]
    assert simulate_check.fitted(DEMANDS, DEMANDS @ costs) == pytest.approx(costs)


def test_a_call_never_costs_less_than_nothing() -> None:
    call_s, frame_s, byte_s = simulate_check.fitted(DEMANDS, DEMANDS @ [-20e-6, 80e-6, 1e-9])
    assert call_s == 0
    assert frame_s > 0
    assert byte_s > 0


@pytest.mark.parametrize(
    ("contender", "size", "ranks", "hosts", "algorithm"),
    [
        ("none", 4096, 4, 4, DIRECT),
        ("none/flat", 4096, 8, 2, DIRECT),
        ("none", 1 << 20, 4, 4, PAIRWISE),
        ("squinch6", 1 << 20, 8, 2, HIERARCHICAL),
        ("squinch6/flat", 1 << 20, 8, 2, PAIRWISE),
    ],
)
def test_a_row_is_compared_with_the_algorithm_that_ran(
    contender: str, size: int, ranks: int, hosts: int, algorithm: str
) -> None:
    cell = simulate_check.cell(measured(contender, size, ranks, hosts), Machine(), CODECS)
    assert cell.predicted.algorithm == algorithm
    assert cell.codec == contender.partition("/")[0]
    assert (cell.measured_s, cell.fastest_s) == (0.020, 0.010)
    assert cell.error == pytest.approx(cell.predicted.time_s / 0.020 - 1)


def test_the_summary_counts_what_is_within_bounds() -> None:
    cell = simulate_check.cell(measured("none", 1 << 20, 4, 4), Machine(), CODECS)
    exact = cell.predicted.time_s
    made = [simulate_check.replace(cell, measured_s=exact * factor) for factor in (1.0, 1 / 1.2, 1 / 1.5)]
    first = simulate_check.summary(made)[0]
    assert "all cells: 3; |error| median 20.0 %, largest 50.0 %; within 10 %: 1, within 25 %: 2" in first


@pytest.mark.parametrize("text", ["4", "0x2", "4x1", "axb", "-1x2"])
def test_worlds_without_sense(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulate_check.parse(["--worlds", text])
    assert "such as 1x4 or 4x2" in capsys.readouterr().err or text.startswith("-")


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(300)
def test_a_small_run(tmp_path: Path) -> None:
    if reason := netns.available():
        pytest.skip(reason)
    flags = [
        "--worlds",
        "1x2",
        "2x2",
        "--links",
        "0.1Gbit",
        "--sizes",
        "1M",
        "--budget",
        "0.2",
        "-J",
        str(tmp_path / "raw.json"),
    ]
    command = [sys.executable, simulate_check.__file__, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: a busy machine, slower than predicted
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert [(cell["hosts"], cell["codec"], cell["predicted"]["algorithm"]) for cell in raw["cells"]] == [
        (2, "none", PAIRWISE),
        (2, "squinch6", PAIRWISE),
        (2, "none", HIERARCHICAL),
        (2, "squinch6", HIERARCHICAL),
        (2, "none", PAIRWISE),
        (2, "squinch6", PAIRWISE),
    ]
    assert raw["machine"]["frame_s"] > 0
    assert all(0.1 < cell["predicted"]["time_s"] / cell["measured_s"] < 10 for cell in raw["cells"])
