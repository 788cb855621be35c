"""`squinchcomm report`: a job as a page to look at, from recordings or from a Prometheus server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from squinchcomm.cli.flags import check_writable
from squinchcomm.errors import ConfigError


def report(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="Where SQUINCH_RECORDER_DIR pointed; files of all hosts together."),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page.")] = Path("squinchcomm-report.html"),
    group: Annotated[
        str | None, typer.Option("--group", metavar="NAME", help="Only this communicator of the recordings.")
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option("--prometheus", metavar="URL", help="A Prometheus server that scraped the ranks.")
    ] = None,
    job: Annotated[str, typer.Option("--job", help="The ranks' label `job` there.")] = "squinchcomm",
    last: Annotated[str, typer.Option("--last", metavar="TIME", help="How far back to look there: 30m, 6h, 2d.")] = "1h",
) -> None:
    """Writes one HTML page about a job: bandwidth, ratio, error, skew and waits over time, slowest calls, failures, settings.

    The page needs no network and no scripts. For a running job send SIGUSR1 to its ranks first, which writes their recordings.
    """
    from squinchcomm.cli.report_page import page

    if (folder is None) == (prometheus is None):
        raise ConfigError("give either DIR, the folder that SQUINCH_RECORDER_DIR named in the job, or --prometheus URL")
    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"-o {output}: give a file that ends in .html")
    check_writable("-o", output)
    if folder is not None:
        from squinchcomm.cli import report_recordings

        made = report_recordings.report(folder, group)
    else:
        from squinchcomm.cli import report_prometheus

        if group is not None:
            raise ConfigError("--group belongs to recordings; metrics are sums over all communicators")
        made = report_prometheus.report(prometheus or "", job, last)
    text = page(made)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    typer.echo(f"report: {output} ({len(text) / 1024:.0f} KiB); open it in a browser")
    for section in made.sections:
        for finding in section.findings:
            typer.echo(f"  {section.title}: {finding}")
