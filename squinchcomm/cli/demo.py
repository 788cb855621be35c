"""`squinchcomm demo`: a small language model trained over a slow link, with float32 and with compressed gradients."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from squinchcomm.cli.processes import MAX_RANKS
from squinchcomm.demo import report
from squinchcomm.demo.records import Run, Settings
from squinchcomm.demo.report import label
from squinchcomm.errors import ConfigError

_MEAN_OVER = 20  # steps; losses of single small batches jump
_BEGINNING = "starting ranks, which compile the kernels the first time"

_console = Console()


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each training.")] = 200,
    ranks: Annotated[
        int, typer.Option(min=1, max=MAX_RANKS, help="Processes on this machine, each with a link of its own.")
    ] = 4,
    link: Annotated[str, typer.Option(help="Emulated rate of each rank's link.")] = "1Gbit",
    codec: Annotated[str, typer.Option(help="Codec to compare with float32.")] = "squinch6",
    out: Annotated[Path, typer.Option(help="Folder for the picture and the raw numbers.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(help="Same seed, same losses.")] = 0,
) -> None:
    """Train a small language model over a slow link, with float32 and with compressed gradients."""
    missing = [name for name in ("torch", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        need = f"The demo needs {' and '.join(missing)}. Install with: pip install '.[demo]' in the checkout"
        _console.print(need, style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2)
    _check(link, codec)
    settings = Settings(codecs=["none", codec], steps=steps, link_rate=link, seed=seed)
    try:
        out.mkdir(parents=True, exist_ok=True)
        settings.write(out / "settings.json")
        (out / "runs.json").unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; give a folder that you may write to") from None
    _train(settings_path=out / "settings.json", ranks=ranks, codecs=settings.codecs, steps=steps)
    runs = [Run(**run) for run in json.loads((out / "runs.json").read_text())]
    _console.print(report.table(runs, ranks=ranks, link_rate=link))
    report.picture(runs, out / "demo.png", ranks=ranks, link_rate=link)
    _console.print(f"Picture: {out / 'demo.png'}   raw numbers: {out / 'runs.json'}", soft_wrap=True)
    if found := report.problems(runs):
        _console.print("\n".join(f"FAILED {problem}" for problem in found), style="red")
        raise typer.Exit(1)
    verdict = f"OK: all ranks hold the same bits; held-out losses agree within {report.LOSS_TOLERANCE} nats per byte"
    _console.print(verdict, soft_wrap=True)


def _check(link: str, codec: str) -> None:
    """Finds what the ranks would refuse before they are started."""
    from squinchcomm.kernels.registry import codec_names
    from squinchcomm.transport.options import parse_rate

    try:
        parse_rate(link)
    except ConfigError as error:
        raise ConfigError(f"--link: {error}") from None
    if codec not in codec_names():
        raise ConfigError(f"--codec {codec}: unknown; there are {', '.join(codec_names())}")


def _train(settings_path: Path, ranks: int, codecs: list[str], steps: int) -> None:
    """Starts the ranks with the library's own launcher and shows how far rank 0 is."""
    module = ["-m", "squinchcomm.demo.train", str(settings_path)]
    command = [sys.executable, "-m", "squinchcomm", "run", "-n", str(ranks), *module]
    progress_path = settings_path.parent / "progress.jsonl"
    progress_path.unlink(missing_ok=True)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            show = _bars if _console.is_terminal else _lines
            show(_smoothed(_tail(progress_path, process)), codecs, steps)
        finally:
            if process.poll() is None:
                process.terminate()
            status = process.wait(timeout=30)
        if status:
            log.seek(0)
            _console.print(log.read(), markup=False, highlight=False, soft_wrap=True)
            _console.print(f"The training ended with status {status}; its output is above.", style="red")
            raise typer.Exit(1)


def _tail(path: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """Lines of `path` as they are written, until the process ends."""
    position, running = 0, True
    while running:
        running = process.poll() is None
        text = path.read_text()[position:] if path.exists() else ""
        complete = text[: text.rfind("\n") + 1]
        position += len(complete)
        yield from map(json.loads, complete.splitlines())
        if running:
            time.sleep(0.2)


def _smoothed(lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same lines with each loss averaged over the last steps."""
    recent: deque[list[float]] = deque(maxlen=_MEAN_OVER)
    for line in lines:
        recent.append(line["losses"])
        yield line | {"losses": [sum(losses) / len(recent) for losses in zip(*recent, strict=True)]}


def _bars(lines: Iterator[dict[str, Any]], codecs: list[str], steps: int) -> None:
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=_console) as progress:
        task = progress.add_task(_BEGINNING, total=steps)
        for line in lines:
            progress.update(task, completed=line["step"], description=_losses(line, codecs))


def _lines(lines: Iterator[dict[str, Any]], codecs: list[str], steps: int) -> None:
    start, every = time.monotonic(), max(1, steps // 10)
    print(f"   0.0 s  {_BEGINNING}", flush=True)
    for line in lines:
        if line["step"] % every == 0 or line["step"] == steps:
            print(f"{time.monotonic() - start:6.1f} s  step {line['step']}/{steps}  {_losses(line, codecs)}", flush=True)


def _losses(line: dict[str, Any], codecs: list[str]) -> str:
    pairs = zip(codecs, line["losses"], strict=True)
    return f"loss (mean of up to {_MEAN_OVER} steps): " + ", ".join(f"{label(codec)} {loss:.3f}" for codec, loss in pairs)
