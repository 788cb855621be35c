"""Runs the command line as users do: in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CLI = [sys.executable, "-m", "squinchcomm"]


def environment(**extra: str) -> dict[str, str]:
    """Ours without what a launcher or user may have set."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("SQUINCH_", "OMP_", "NUMBA_", "MASTER_"))
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        inherited.pop(name, None)
    return inherited | extra


def squinchcomm(*arguments: str | Path, timeout: float = 60, env: dict[str, str] | None = None, **options: Any) -> Any:
    """The finished process of `squinchcomm ARGUMENTS...`, with its output as text."""
    options.setdefault("stdin", subprocess.DEVNULL)
    command = [*CLI, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment(**(env or {})), check=False, **options
    )


def start(*arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """`squinchcomm ARGUMENTS...`, running."""
    return subprocess.Popen(
        [*CLI, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**(env or {})),
    )
