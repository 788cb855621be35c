"""All commands of `squinchcomm`. What a command needs beyond the standard library is imported when it runs."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from squinchcomm import __version__
from squinchcomm.cli import bench, doctor, env, inspect, keygen, report, run, simulate, top, trace

app = typer.Typer(
    name="squinchcomm",
    help="Collectives for networks slower than the accelerators: launch, look, measure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"squinchcomm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app.command(context_settings=run.PASS_THROUGH, options_metavar="[OPTIONS] SCRIPT [ARGS]...")(run.run)
app.command()(bench.bench)
app.command()(doctor.doctor)
app.command()(keygen.keygen)
app.command()(env.env)
app.command()(simulate.simulate)
app.command()(top.top)
app.command()(trace.trace)
app.command()(report.report)
app.command()(inspect.inspect)

if importlib.util.find_spec("squinchcomm.cli.demo"):
    from squinchcomm.cli.demo import demo

    app.command()(demo)
