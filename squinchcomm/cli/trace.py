"""`squinchcomm trace`: which rank is behind or differs, from the files of the flight recorder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from squinchcomm.cli.flags import check_writable
from squinchcomm.errors import ConfigError

if TYPE_CHECKING:
    from squinchcomm.cli.trace_compare import Verdict


def trace(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where SQUINCH_RECORDER_DIR pointed; files of all hosts together.")
    ],
    group: Annotated[str | None, typer.Option("--group", metavar="NAME", help="Look at this communicator alone.")] = None,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", help="Write a trace for Perfetto or chrome://tracing here.")
    ] = None,
) -> None:
    """Merges the recordings of all ranks; names the rank that is behind or differs, and the first call where they part.

    Ends with status 1 if ranks differ, one is missing, or a call failed or hangs.
    """
    from squinchcomm.cli.trace_compare import compare
    from squinchcomm.recordings import read_folder

    if export is not None:
        check_writable("--export", export)
    recordings, problems = read_folder(folder)
    if group is not None:
        known = sorted({each.header.group for each in recordings})
        recordings = [each for each in recordings if each.header.group == group]
        if not recordings:
            raise ConfigError(f"--group {group}: there are {', '.join(known)}")
    verdicts = compare(recordings)
    for verdict in verdicts:
        typer.echo("\n".join(_report(verdict)))
    damage = [f"{each.path.name}: {text}" for each in recordings for text in each.damage]
    for text in (*problems, *damage):
        typer.echo(f"damaged: {text}")
    if export is not None:
        _export(verdicts, export)
    if any(verdict.differ for verdict in verdicts):
        raise typer.Exit(1)


def _report(verdict: Verdict) -> list[str]:
    from squinchcomm.cli.trace_compare import named

    calls = [number for each in verdict.ranks.values() for number in each.calls]
    size = len(verdict.ranks) + len(verdict.missing)
    span = f"calls #{min(calls)} to #{max(calls)}" if calls else "no calls"
    lines = [f"communicator {verdict.group}: {len(verdict.ranks)} of {size} ranks, {span}"]
    if not verdict.differ:
        lines.append("  all ranks agree")
    if verdict.first is not None:
        culprits = f": {named(verdict.culprits)}" if verdict.culprits else ""
        lines.append(f"  ranks part in call #{verdict.first}{culprits}")
    lines += [f"  - {finding}" for finding in verdict.findings]
    return lines + [f"  ({note})" for note in verdict.notes]


def _export(verdicts: list[Verdict], path: Path) -> None:
    import msgspec

    from squinchcomm.cli.trace_export import chrome_trace

    made = chrome_trace(verdicts)
    path.write_bytes(msgspec.json.encode(made))
    typer.echo(f"trace: {path} ({len(made['traceEvents'])} events); open it at https://ui.perfetto.dev")
    if not any(recording.chunks for verdict in verdicts for recording in verdict.ranks.values()):
        typer.echo("       it has no chunks: set SQUINCH_RECORDER_CHUNKS=1 in the job for encode, wire and decode of each")
