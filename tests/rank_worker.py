"""One rank of a process group under test: makes a few calls, then all-reduces until told or until something breaks.

Prints one JSON line for each event. Arguments: rank, world size, address, and settings as a JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

import squinchcomm


def say(**event: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **event}), flush=True)


def main() -> None:
    rank, world_size, address, options = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    count, codec, pause_s = options.pop("count", 200_000), options.pop("codec", "none"), options.pop("pause_s", 0.0)
    calls, forget = options.pop("calls", 10**9), options.pop("forget_to_close", False)
    try:
        comm = squinchcomm.init(rank, world_size, address, min_compress_bytes=0, **options)
    except squinchcomm.SquinchError as error:
        say(event="refused", error=type(error).__name__, message=str(error), peer=error.peer)
        return
    array = np.random.default_rng(rank).standard_normal(count).astype(np.float32)
    done = 0
    try:
        comm.allreduce(array, "avg", codec=codec)
        say(event="ready")
        while done < calls:
            comm.allreduce(array, "avg", codec=codec)
            done += 1
            time.sleep(pause_s)
        comm.barrier()
    except squinchcomm.SquinchError as error:
        say(event="failed", error=type(error).__name__, message=str(error), peer=error.peer, done=done)
    if forget:
        comm.recv(np.zeros(3), async_op=True)  # for which nobody has a send
        return
    started = time.monotonic()
    comm.close()
    say(event="closed", took_s=time.monotonic() - started, done=done, hash=hash(array.tobytes()) if done == calls else None)


if __name__ == "__main__":
    main()
