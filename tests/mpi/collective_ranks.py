"""Program: the collective checks, each rank a process; prints one line for each check. Argument: "none" or "squinch6" and the like."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

import squinchcomm
from squinchcomm.communicator import Communicator
from squinchcomm.kernels.dtypes import BFLOAT16, dtype_name
from tests.conformance import collective_checks as checks

WORLD = MPI.COMM_WORLD
SMALL = (1, 513, 20_011)


def world(comm: MPI.Intracomm, size: int, body: Callable[[Communicator], Any], **settings: Any) -> list[Any]:
    """Runs `body` on this rank of a new communicator; what it returned on all of them."""
    assert comm.size == size
    with squinchcomm.init(comm=comm, **settings) as ours:
        assert "mpi" in repr(ours) or size == 1
        result = body(ours)
    return gathered(comm, result)


def gathered(comm: MPI.Intracomm, result: Any) -> list[Any]:
    """Everybody's arrays, by buffer calls of MPI."""
    if result is None:
        return [None] * comm.size
    arrays = result if isinstance(result, list) else [result]
    packed = msgspec.msgpack.encode([(dtype_name(a.dtype), a.shape, a.tobytes()) for a in map(np.asarray, arrays)])
    sizes = np.zeros(comm.size, np.int64)
    comm.Allgather(np.array([len(packed)], np.int64), sizes)
    whole = bytearray(int(sizes.sum()))
    comm.Allgatherv([packed, MPI.BYTE], [whole, sizes, MPI.BYTE])
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    everybody = [
        [
            np.frombuffer(data, BFLOAT16 if name == "bfloat16" else np.dtype(name)).reshape(shape)
            for name, shape, data in msgspec.msgpack.decode(bytes(whole[bounds[rank] : bounds[rank + 1]]))
        ]
        for rank in range(comm.size)
    ]
    return everybody if isinstance(result, list) else [arrays[0] for arrays in everybody]


def lossless(comm: MPI.Intracomm) -> dict[str, Callable[[], None]]:
    run = functools.partial(world, comm), comm.size
    floats = {f"allreduce sum {dtype_name(np.dtype(d))}": functools.partial(checks.check_allreduce, *run, d, "sum", SMALL)
              for d in checks.DTYPES}  # fmt: skip
    return {
        **floats,
        "allreduce avg": lambda: checks.check_allreduce(*run, np.float32, "avg"),
        "allreduce max": lambda: checks.check_allreduce(*run, np.int32, "max", SMALL),
        "reduce": lambda: checks.check_reduce(*run),
        "reduce_scatter": lambda: checks.check_reduce_scatter(*run, None),
        "all_gather": lambda: checks.check_all_gather(*run, np.float32),
        "broadcast": lambda: checks.check_broadcast(*run, np.float32),
        "gather, scatter": lambda: checks.check_gather_scatter(*run),
        "all_to_all": lambda: checks.check_all_to_all(*run),
        "views": lambda: checks.check_views(*run),
        "async": lambda: checks.check_async(*run),
        "messages": lambda: checks.check_messages(*run),
        "split": lambda: checks.check_split(*run),
    }


def compressed(comm: MPI.Intracomm) -> dict[str, Callable[[], None]]:
    run = functools.partial(world, comm), comm.size
    return {
        **{f"allreduce {codec}": functools.partial(checks.check_compressed_allreduce, *run, codec, np.float32, "sum", checks.COUNTS)
           for codec in ("squinch6", "squinch6-sr", "bf16", "int8")},
        "allreduce avg bfloat16": lambda: checks.check_compressed_allreduce(*run, "squinch6", BFLOAT16, "avg", (1, 513, 100_003)),
        "reduce_scatter squinch6": lambda: checks.check_reduce_scatter(*run, "squinch6"),
        "all_gather squinch6": lambda: checks.check_compressed_all_gather(*run),
        "nonfinite": lambda: checks.check_nonfinite(*run, "squinch6"),
        "extremes": lambda: checks.check_extremes(*run),
    }  # fmt: skip


def main() -> None:
    # The group of all, and one that leaves rank 0 out: its ranks are not MPI's.
    groups = [WORLD.Dup(), WORLD.Split(int(WORLD.rank > 0), key=-WORLD.rank)]
    for comm in groups:
        for name, check in {**lossless(comm), **compressed(comm)}.items():
            if comm.size == 1 or (comm is groups[1] and "allreduce" in name and "squinch6" not in name):
                continue
            started = time.monotonic()
            check()
            if comm.rank == 0:
                print(f"passed {name} on {comm.size} ranks {time.monotonic() - started:.2f} s", flush=True)
        comm.Free()


if __name__ == "__main__":
    sys.exit(main())
