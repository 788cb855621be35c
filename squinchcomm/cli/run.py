"""`squinchcomm run`: several ranks of a script on this machine."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from typing import Annotated

import typer

from squinchcomm.cli.processes import MAX_RANKS, RESERVED_VARIABLES, Job
from squinchcomm.errors import ConfigError

_MAX_SECONDS = 1e9

# Everything from the script's name on belongs to the script.
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def run(
    context: typer.Context,
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, max=MAX_RANKS, help="Ranks to start.")] = 2,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT names a Python module, as for `python -m`.")] = False,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Variable for all ranks; repeatable.")
    ] = None,
    emulate_link: Annotated[
        str | None, typer.Option("--emulate-link", metavar="RATE", help="Slow every rank's link down to, say, 1Gbit.")
    ] = None,
    timeout: Annotated[float | None, typer.Option("--timeout", help="Seconds after which the job fails.")] = None,
    grace: Annotated[float, typer.Option("--grace", help="Seconds between asking ranks to stop and killing them.")] = 5.0,
    prefix: Annotated[bool, typer.Option("--prefix/--no-prefix", help="Show the rank in front of each line.")] = True,
) -> None:
    """Starts ranks of SCRIPT [ARGS]... on this machine and stops them all when one fails.

    A file ending in .py runs under this Python, anything else as a program.

    The exit status is that of the rank that failed first, 128 + n if signal n ended it, 124 after the timeout.

    Standard input goes to rank 0, unless it is a terminal.
    """
    _check_seconds(timeout, grace)
    command, variables = _command(module, context.args), _variables(env or [], emulate_link)
    if ranks > 1 and {**os.environ, **variables}.get("SQUINCH_TRANSPORT") == "inproc":
        warnings.warn("SQUINCH_TRANSPORT=inproc joins threads of one process, and these ranks are processes", stacklevel=1)
    job = Job(
        command=command,
        world_size=ranks,
        extra_env=variables,
        output="prefixed" if prefix else "lines",
        timeout_s=timeout,
        grace_s=grace,
    )
    try:
        status = job.run()
    except OSError as error:
        raise ConfigError(f"cannot start {job.command[0]!r}: {error.strerror}; is it a program for this machine?") from None
    raise typer.Exit(status)


def _check_seconds(timeout: float | None, grace: float) -> None:
    if timeout is not None and not 0 < timeout <= _MAX_SECONDS:
        raise ConfigError(
            f"--timeout {timeout:g}: give seconds above 0, at most {_MAX_SECONDS:g}, or leave it out for no limit"
        )
    if not 0 <= grace <= _MAX_SECONDS:
        raise ConfigError(f"--grace {grace:g}: give seconds from 0 to {_MAX_SECONDS:g}")


def _command(module: bool, arguments: list[str]) -> list[str]:
    if not arguments:
        raise ConfigError("nothing to run; give a script: squinchcomm run -n 4 script.py")
    program = arguments[0]
    if module:
        return [sys.executable, "-m", *arguments]
    if program.endswith(".py"):
        if not os.path.isfile(program):
            raise ConfigError(f"there is no file {program!r}; give the path of a script")
        return [sys.executable, *arguments]
    if shutil.which(program) is None:
        raise ConfigError(f"{program!r} is neither a .py file nor a program on PATH; for a module use -m")
    return list(arguments)


def _variables(settings: list[str], emulate_link: str | None) -> dict[str, str]:
    from squinchcomm.transport.options import parse_rate

    variables = {}
    if emulate_link is not None:
        try:
            parse_rate(emulate_link)
        except ConfigError as error:
            raise ConfigError(f"--emulate-link: {error}") from None
        variables["SQUINCH_LINK_RATE"] = emulate_link
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator or not name:
            raise ConfigError(f"--env {setting}: not of the form NAME=VALUE")
        if name in RESERVED_VARIABLES:
            raise ConfigError(f"--env {setting}: squinchcomm run sets {name} itself for each rank; the number of ranks is -n")
        if name == "SQUINCH_LINK_RATE" and emulate_link is not None:
            raise ConfigError(f"--env {setting}: --emulate-link {emulate_link} says the same variable; give one of them")
        variables[name] = value
    return variables
