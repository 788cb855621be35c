"""`squinchcomm env`: every setting, its value and where that came from."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from squinchcomm.config import LAUNCH_VARIABLES, Config, settings
from squinchcomm.errors import ConfigError


def env(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The variables as a Markdown table, for documents.")] = False,
) -> None:
    """Shows each setting's variable, value, source, default and meaning, as a rank started from this shell would see them."""
    if as_json and markdown:
        raise ConfigError("--json and --markdown: give one of them")
    if markdown:
        typer.echo(markdown_table())
        return
    config = Config.from_env()
    check_names(config)
    if as_json:
        typer.echo(json.dumps(rows(config), indent=2))
    else:
        _print_table(rows(config))


def check_names(config: Config) -> None:
    """Looks up codec and transport, which `Config` takes by any name: programs may register theirs later.

    Raises:
        ConfigError: nothing built in or installed has the name; lists what has one.
    """
    from squinchcomm.kernels.registry import codec_names
    from squinchcomm.policy import AUTO
    from squinchcomm.transport.registry import backend_names

    for variable, name, known in (
        ("SQUINCH_CODEC", config.codec, (*codec_names(), AUTO)),
        ("SQUINCH_TRANSPORT", config.transport, backend_names()),
    ):
        if name not in known:
            raise ConfigError(f"{variable}={name}: unknown; there are {', '.join(known)}")


def rows(config: Config) -> list[dict[str, Any]]:
    """One row a variable, in the order of `Config`, then those of the launcher."""
    table = [
        {
            "variable": setting.env,
            "value": as_text(getattr(config, name)),
            "source": config.sources[name],
            "default": as_text(default),
            "allowed": setting.allowed,
            "meaning": setting.doc,
        }
        for name, default, setting in settings()
    ]
    for name, meaning in LAUNCH_VARIABLES.items():
        value = os.environ.get(name, "")
        shown = "(hidden)" if value and name.endswith("TOKEN") else value
        source = "environment" if value else "default"
        table.append({"variable": name, "value": shown, "source": source, "default": "", "allowed": "text", "meaning": meaning})
    return table


def as_text(value: object) -> str:
    """A setting's value as its variable would hold it; "" for None."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def markdown_table() -> str:
    """The settings as a Markdown table: variable, argument, default, allowed values, meaning."""
    lines = ["| variable | argument | default | allowed | meaning |", "|---|---|---|---|---|"]
    for name, default, setting in settings():
        shown = f"`{as_text(default)}`" if default is not None else "not set"
        lines.append(f"| `{setting.env}` | `{name}` | {shown} | {setting.allowed} | {setting.doc} |")
    lines += [f"| `{name}` | | not set | text | {meaning} |" for name, meaning in LAUNCH_VARIABLES.items()]
    return "\n".join(lines)


def _print_table(table: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table("variable", "value", "source", "default", "meaning", box=None, pad_edge=False)
    for row in table:
        style = None if row["source"] == "default" else "bold"
        shown.add_row(row["variable"], row["value"] or "-", row["source"], row["default"] or "-", row["meaning"], style=style)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(shown)
