"""The demo: what it reads, what it shows, when it fails, and that it repeats itself."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from squinchcomm.cli.app import app
from squinchcomm.cli.demo import _smoothed
from squinchcomm.demo import corpus, report
from squinchcomm.demo.records import Run

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


def a_run(codec: str, final: float = 2.5, agree: bool = True) -> Run:
    steps = 4
    return Run(
        codec,
        parameters=1000,
        train_loss=[5.0, 4.0, 3.0, 2.6],
        held_out_loss=[(2, 4.1), (4, final)],
        compute_s=[0.1] * steps,
        communication_s=[0.2 if codec == "none" else 0.05] * steps,
        wire_bytes=[6000 if codec == "none" else 1130] * steps,
        ranks_agree=agree,
    )


def test_held_out_text_is_never_trained_on() -> None:
    text = corpus.load()
    assert text.train.size > 1_000_000
    assert text.held_out.size > 50_000
    piece = text.held_out[1000:1200].tobytes()
    assert piece not in text.train.tobytes()


def test_batches_fit_the_text_and_repeat() -> None:
    stream = np.arange(100, dtype=np.uint8)
    first, again = (corpus.batch(stream, np.random.default_rng(3), 5, 98) for _ in range(2))
    assert first.shape == (5, 99)
    assert (np.diff(first, axis=1) == 1).all()
    assert (first == again).all()


def test_nothing_to_complain_about() -> None:
    assert report.problems([a_run("none"), a_run("squinch6", 2.52)]) == []


@pytest.mark.parametrize(
    ("runs", "word"),
    [
        ([a_run("none"), a_run("squinch6", agree=False)], "different parameters"),
        ([a_run("none"), a_run("squinch6", 2.5 + 2 * report.LOSS_TOLERANCE)], "differs"),
        ([a_run("none"), a_run("squinch6", 2.5 - 2 * report.LOSS_TOLERANCE)], "differs"),
        ([a_run("none"), a_run("squinch6", float("nan"))], "differs"),
    ],
)
def test_problems_are_found(runs: list[Run], word: str) -> None:
    (problem,) = report.problems(runs)
    assert problem.startswith("squinch6")
    assert word in problem


def test_table_compares_the_runs() -> None:
    from rich.console import Console

    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(report.table([a_run("none"), a_run("squinch6")], ranks=4, link_rate="1Gbit"))
    text = console.export_text()
    assert "float32" in text
    assert "5.31x" in text  # bytes
    assert "2.00x" in text  # step time


def test_picture_is_a_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    for waiting_s in (0.05, 0.19, 0.2):  # a run that ends early, or as late as the first
        runs = [a_run("none"), replace(a_run("squinch6"), communication_s=[waiting_s] * 4)]
        report.picture(runs, tmp_path / "new" / "demo.png", ranks=4, link_rate="1Gbit")
        wire = figures[-1].axes[2]
        assert len(wire.texts) == 2
        for text in wire.texts:
            edges, inside = text.get_window_extent(), wire.get_window_extent()
            assert inside.x0 <= edges.x0 and edges.x1 <= inside.x1 and edges.y1 <= inside.y1, text
    assert (tmp_path / "new" / "demo.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.undo()
    pyplot.close("all")


def test_picture_of_one_rank_that_sends_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [replace(a_run(codec), wire_bytes=[0] * 4) for codec in ("none", "squinch6")]
    report.picture(runs, tmp_path / "demo.png", ranks=1, link_rate="1Gbit")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_missing_torch_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2
    assert "pip install '.[demo]'" in result.output


def run_demo(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "squinchcomm", "demo", "--out", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def losses(out: Path) -> list[tuple[list[float], list[list[float]]]]:
    return [(run["train_loss"], run["held_out_loss"]) for run in json.loads((out / "runs.json").read_text())]


@needs_torch
def test_two_ranks_train(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--steps", "3", "--ranks", "2", "--link", "10Gbit")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK: all ranks hold the same bits" in done.stdout
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    plain, compressed = json.loads((tmp_path / "runs.json").read_text())
    assert 5.2 < plain["wire_bytes"][0] / compressed["wire_bytes"][0] < 5.4
    assert plain["train_loss"][0] == compressed["train_loss"][0]


@needs_torch
@pytest.mark.slow
def test_same_seed_same_losses(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        done = run_demo(tmp_path / folder, "--steps", "6", "--ranks", "3", "--link", "10Gbit", "--seed", "5")
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "first") == losses(tmp_path / "second")


@needs_torch
def test_a_failing_rank_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUINCH_TIMEOUT", "never")
    done = run_demo(tmp_path, "--steps", "2", "--ranks", "2")
    assert done.returncode == 1
    assert "SQUINCH_TIMEOUT=never" in done.stdout


@needs_torch
@pytest.mark.parametrize("option", ["--codec", "--link"])
def test_wrong_options_are_found_before_ranks_start(tmp_path: Path, option: str) -> None:
    done = run_demo(tmp_path / "out", option, "nonesuch")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"squinchcomm: error: {option}")
    assert not (tmp_path / "out").exists()


def test_progress_shows_means() -> None:
    lines = [{"step": step, "losses": [float(step), 0.0]} for step in range(1, 31)]
    shown = list(_smoothed(iter(lines)))
    assert shown[0]["losses"] == [1.0, 0.0]
    assert shown[1]["losses"] == [1.5, 0.0]
    assert shown[29]["losses"] == [20.5, 0.0]
