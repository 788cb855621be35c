"""`squinchcomm keygen`: the key that all ranks of a job share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from squinchcomm.config import expand_path
from squinchcomm.errors import ConfigError

_DEFAULT = Path("~/.config/squinchcomm/job.key")


def keygen(
    path: Annotated[Path, typer.Argument(help="Where the key goes.")] = _DEFAULT,
    force: Annotated[bool, typer.Option("--force", help="Replace a key that is there.")] = False,
) -> None:
    """Writes a new job key, readable by you alone, that ranks on several machines encrypt and authenticate with."""
    from squinchcomm.transport.security import generate_key_file

    target = expand_path(path).absolute()
    if target.exists() and not force:
        raise ConfigError(f"{target} exists; --force replaces it, and ranks that still have the old key are then turned away")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Renaming leaves no moment in which there is half a key.
        fresh = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            generate_key_file(fresh)
            fresh.replace(target)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror}; give a path in a folder that you may write to") from None
    typer.echo(f"Wrote {target}. Copy it to every machine of the job (mode 0600), then on all ranks:")
    typer.echo(f"  export SQUINCH_KEY_FILE={target}")
