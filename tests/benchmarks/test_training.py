"""The training benchmark: its arithmetic, that it goes on where it stopped, and that it trains."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import training
import training_report
from training_contenders import BASE, CONTENDERS, OF_LOSSES, OF_STEPS

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


def rounds(times: dict[str, list[list[tuple[float, float, float]]]], digests: tuple[str, str] = ("a", "a")) -> list[Any]:
    """Records of two ranks; `times` has (with averaging, without, bytes) by contender, round and rank."""
    settings = {"contenders": list(times)}
    error = {"gloo-f32": 0.0, "squinch": 0.05}
    checks = [{"checks": {name: {"error": error[name], "digest": digest} for name in times}} for digest in digests]
    count = len(next(iter(times.values())))
    answers = [[{name: times[name][number][rank] for name in times} for rank in range(2)] for number in range(count)]
    return [
        {"kind": "check", "settings": settings, "ranks": checks},
        *({"kind": "round", "settings": settings, "ranks": each} for each in answers),
    ]


TIMES = {
    "gloo-f32": [[(5.0, 1.0, 600.0), (6.0, 1.0, 400.0)], [(7.0, 2.0, 500.0), (7.0, 1.0, 500.0)]],
    "squinch": [[(2.0, 1.0, 100.0), (1.5, 1.0, 90.0)], [(2.0, 1.0, 95.0), (1.0, 1.0, 95.0)]],
}


def test_communication_is_what_the_slowest_rank_takes_longer() -> None:
    base, ours = training_report.step_rows(rounds(TIMES))
    assert base.communication_s == 5.0  # of 6 - 1 and 7 - 2
    assert base.sent_bytes == 500.0
    assert ours.communication_s == 1.0
    assert ours.speedup[BASE] == (5.0, 5.0, 5.0)
    assert base.ok and ours.ok


def test_ranks_that_differ_are_seen() -> None:
    for row in training_report.step_rows(rounds(TIMES, digests=("a", "b"))):
        assert not row.ok


def trainings(losses: dict[str, list[float]], identical: bool = True) -> list[Any]:
    return [
        {"contender": name, "seed": seed, "held_out_loss": loss, "identical": identical}
        for name, found in losses.items()
        for seed, loss in enumerate(found)
    ]


@pytest.mark.parametrize(
    ("name", "found", "ok"),
    [
        ("squinch", [1.006, 1.996, 2.99], True),  # seeds apart, their mean is not
        ("squinch", [1.01, 2.0, 3.0], False),
        ("squinch", [0.99, 2.0, 3.0], False),
        ("squinch", [float("nan"), 2.0, 3.0], False),
        ("squinch", [1.01], True),  # one seed says little
        ("squinch", [1.03], False),
        ("powersgd", [1.1, 2.2, 3.3], True),  # shown, not judged
    ],
)
def test_losses_are_compared_seed_by_seed(name: str, found: list[float], ok: bool) -> None:
    base, row = training_report.loss_rows(trainings({BASE: [1.0, 2.0, 3.0][: len(found)], name: found}))
    assert base.ok and base.gap == 0
    assert row.ok is ok


def test_ranks_that_end_apart_are_off() -> None:
    assert not any(row.ok for row in training_report.loss_rows(trainings({BASE: [1.0], "squinch": [1.0]}, identical=False)))


def test_half_a_line_of_an_interrupted_run_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "raw" / "kept.jsonl"
    kept = training.Kept(path, fresh=False)
    kept.add({"kind": "training", "seed": 1})
    with path.open("a") as file:
        file.write('{"kind": "trai')
    again = training.Kept(path, fresh=False)
    again.add({"kind": "training", "seed": 2})
    assert [record["seed"] for record in training.Kept(path, fresh=False).having(kind="training")] == [1, 2]
    assert training.Kept(path, fresh=True).records == []


def test_contenders_have_names_and_words() -> None:
    assert set(OF_STEPS) | set(OF_LOSSES) == set(CONTENDERS)
    assert len({contender.text for contender in CONTENDERS.values()}) == len(CONTENDERS)


@needs_torch
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.root
def test_it_measures_trains_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib")
    if reason := training.netns.available():
        pytest.skip(reason)
    monkeypatch.setattr(training, "REPORTS", tmp_path)
    monkeypatch.setattr(training, "_terminate", signal.getsignal(signal.SIGTERM))  # this process keeps its handler
    raw = tmp_path / "raw.jsonl"
    chosen = ["--ranks", "2", "--rounds", "2", "--steps", "20", "--seeds", "0", "--raw", str(raw), "--report"]
    arguments = [*chosen, "--contenders", "gloo-f32", "squinch", "hook-gloo"]
    assert training.main(arguments) in (0, 1)  # 20 steps may end further apart than 0.3 %
    records = [json.loads(line) for line in raw.read_text().splitlines()]
    assert [record["kind"] for record in records] == ["check"] + 2 * ["round"] + 3 * ["training"]
    assert all(record["identical"] for record in records[3:])
    assert all(training_report.step_rows(records[:3])[index].ok for index in range(3))
    (report,) = tmp_path.glob("training-*.md")
    assert "| hook-gloo |" in report.read_text()
    assert next(tmp_path.glob("training-*.png")).read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    training.main(arguments)
    assert "seed 0: held-out" not in capsys.readouterr().out  # nothing was left to do
    assert raw.read_text().count("\n") == len(records)


@pytest.mark.parametrize("size", ["0", "-3", "nan", "inf", "x"])
def test_bucket_sizes_that_ddp_cannot_have_are_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        training.parse(["--bucket-mb", size])
    assert "--bucket-mb" in capsys.readouterr().err.splitlines()[-1]
