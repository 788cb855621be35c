"""Writes the dashboards beside this file, for Grafana to read: `python -m dashboards` in the folder of the sources."""

from __future__ import annotations

import json
from pathlib import Path

from dashboards.faults import FAULTS
from dashboards.numerics import NUMERICS
from dashboards.overview import OVERVIEW
from dashboards.ranks import RANKS

FOLDER = Path(__file__).resolve().parent


def files() -> dict[Path, str]:
    """Path and text of each dashboard."""
    return {
        FOLDER / f"{board['uid'].removeprefix('squinchcomm-')}.json": json.dumps(board, indent=2) + "\n"
        for board in (OVERVIEW, RANKS, NUMERICS, FAULTS)
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(path)
