"""Program: all-reduces until rank 1 does what the argument says; prints one JSON line for each event.

Arguments: kill, stop, raise or exit; and settings as a JSON object, with `apart` as if each rank had a host of its own. What is
raised is not caught, so that the job ends as it would.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np

import squinchcomm


def say(**event: Any) -> None:
    print(json.dumps({"at": time.time(), **event}), flush=True)


def misbehave(how: str) -> None:
    say(event=how)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exit":
        sys.exit(0)
    raise RuntimeError("on purpose")


def main() -> None:
    how, options = sys.argv[1], json.loads(sys.argv[2])
    codec, survive = options.pop("codec", "none"), options.pop("survive", False)
    if options.pop("apart", False):
        options["host"] = f"host-of-{os.getpid()}"
    array = np.ones(500_000, np.float32)
    with squinchcomm.init(transport="mpi", min_compress_bytes=0, **options) as comm:
        comm.allreduce(array, "avg", codec=codec)
        comm.barrier()
        started = time.monotonic()
        try:
            while True:
                if comm.rank == 1 and time.monotonic() - started > 0.5:
                    misbehave(how)
                comm.allreduce(array, "avg", codec=codec)
        except squinchcomm.SquinchError as error:
            say(event="failed", rank=comm.rank, error=type(error).__name__, peer=error.peer)
            if not survive:
                raise
            with comm.shrink() as rest:
                ones = np.ones(100_000)
                rest.allreduce(ones)
                say(event="shrunk", rank=comm.rank, world_size=rest.world_size, sum=float(ones[-1]))
        comm.close()
        say(event="closed", rank=comm.rank)


if __name__ == "__main__":
    main()
