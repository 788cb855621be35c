"""`squinchcomm top`: what all ranks of a job do at the moment."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from squinchcomm.errors import ConfigError

if TYPE_CHECKING:
    from squinchcomm.cli.readings import Reading, Source
    from squinchcomm.cli.top_rows import Board

_SHORTEST_S, _LONGEST_S = 0.1, 3600.0


def top(
    targets: Annotated[list[str] | None, typer.Argument(metavar="[HOST:PORT]...", help="Exporters of the ranks.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", help="SQUINCH_METRICS_PORT of the job: rank i of a host is on PORT + i.")
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", help="Ranks on each host, with --port.")] = None,
    hosts: Annotated[
        list[str] | None, typer.Option("--host", metavar="HOST", help="Hosts for --port; repeatable. Default: this one.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="PATH", help="Targets as Prometheus reads them (.json), or a folder of *.prom files."),
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option("--prometheus", metavar="URL", help="A Prometheus server that scrapes the ranks.")
    ] = None,
    job: Annotated[str, typer.Option("--job", help="The ranks' label `job` there.")] = "squinchcomm",
    once: Annotated[bool, typer.Option("--once", help="Show one table and end; status 1 if no rank answers.")] = False,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="Between looks.")] = 2.0,
) -> None:
    """Shows collectives, bytes, waits and failures of every rank, again and again, until Ctrl-C.

    Ranks that others wait for are marked, and so are those that do not answer. Lines of text if this is not a terminal.
    """
    from squinchcomm.cli.targets import find_source

    if not _SHORTEST_S <= interval <= _LONGEST_S:
        raise ConfigError(f"--interval {interval:g}: give {_SHORTEST_S:g} to {_LONGEST_S:g} seconds")
    source = find_source(targets or [], port, ranks, hosts or [], file, prometheus, job)
    try:
        if once:
            _show_once(source, interval)
        else:
            _show_live(source, interval)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # whoever read our lines has had enough; Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_once(source: Source, interval: float) -> None:
    from rich.console import Console

    from squinchcomm.cli.top_rows import Board
    from squinchcomm.cli.top_view import answered, as_lines, as_table

    board = Board()
    readings = source.read()
    board.take(readings)
    if any(row.problem is None and row.collectives_per_s is None for row in board.rows()):
        time.sleep(interval)  # counters tell rates only when read twice
        readings = source.read()
        board.take(readings)
    rows = board.rows()
    console = Console()
    if console.is_terminal:
        console.print(as_table(rows, None, len(rows) + 8, console.width))
    else:
        typer.echo("\n".join(as_lines(rows)))
    if not answered(readings):
        raise typer.Exit(1)


def _show_live(source: Source, interval: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from squinchcomm.cli.top_rows import Board
    from squinchcomm.cli.top_view import as_lines, as_table

    board = Board()
    board.take(source.read())  # before the screen is taken: a wrong flag ends the command here
    console = Console()
    if not console.is_terminal:
        for trouble in _looks(source, board, interval, soon=False):
            print("\n".join(as_lines(board.rows(), trouble)), flush=True)
        return
    with _TerminalRestored(), Live(console=console, screen=True, auto_refresh=False) as live:
        for trouble in _looks(source, board, interval, soon=True):
            live.update(as_table(board.rows(), trouble, console.height, console.width), refresh=True)


def _looks(source: Source, board: Board, interval: float, soon: bool) -> Iterator[str | None]:
    """Reads again and again, without end; yields after each look what stood in the way of it, if something did."""
    if soon:
        yield None
    due = time.monotonic()
    while True:
        due = max(due + interval, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        yield _look(source, board)


def _look(source: Source, board: Board) -> str | None:
    try:
        readings: list[Reading] = source.read()
    except ConfigError as error:
        return f"last values; {error}"
    board.take(readings)
    return None


class _TerminalRestored:
    """While it is open, SIGTERM ends the command as Ctrl-C does, so that the terminal gets its screen back."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGTERM, self._stop)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    @staticmethod
    def _stop(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)
