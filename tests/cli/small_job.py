"""A job to look at: rank 1 is late for every collective. Ends when the file `stop` is in the folder; with `fail`, ranks part first."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import squinchcomm

LATE_S = 0.04


def main() -> None:
    folder = Path(sys.argv[1])
    with squinchcomm.init(timeout_s=20) as comm:
        data = np.random.default_rng(comm.rank).standard_normal(200_000).astype(np.float32)
        told = np.zeros(2, np.float32)
        while not told[0]:
            told[:] = [(folder / name).exists() for name in ("stop", "fail")]
            comm.allreduce(told, "max")
            if told[1]:
                break
            if comm.rank == 1:
                time.sleep(LATE_S)
            comm.allreduce(data.copy(), "avg", codec="squinch6")
        (folder / f"passed.{comm.rank}").touch()
        if told[1]:
            try:
                comm.allreduce(data[: 1000 + comm.rank])
            except squinchcomm.SquinchError as error:
                print("failed as told:", type(error).__name__, flush=True)
            while not (folder / "stop").exists():
                time.sleep(0.05)


if __name__ == "__main__":
    main()
