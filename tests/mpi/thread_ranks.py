"""Program: collectives and messages with the support for threads that MPI was asked for. Argument: serialized, funneled or single."""

from __future__ import annotations

import sys
import threading

import mpi4py

mpi4py.rc.thread_level = sys.argv[1]

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import squinchcomm  # noqa: E402

LEVELS = {"single": MPI.THREAD_SINGLE, "funneled": MPI.THREAD_FUNNELED, "serialized": MPI.THREAD_SERIALIZED}


def main() -> None:
    assert MPI.Query_thread() == LEVELS[sys.argv[1]], MPI.Query_thread()
    try:
        comm = squinchcomm.init(comm=MPI.COMM_WORLD)
    except squinchcomm.ConfigError as error:
        print(f"refused: {error}", flush=True)
        return
    with comm:
        works = [comm.allreduce(np.full(200_000, index, np.float32), async_op=True) for index in range(10)]
        right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        sent = comm.send(np.full(300_000, comm.rank), right, async_op=True)
        box = np.zeros(300_000, np.int64)
        comm.recv(box, left)
        assert np.all(box == left)
        child = comm.split(0, key=-comm.rank)
        assert child is not None
        child.barrier()
        for work in (*works, sent):
            assert work is not None
            work.wait(20.0)
        child.close()
        assert not any(thread.name == "squinchcomm-mpi" for thread in threading.enumerate())
    print("works", flush=True)


if __name__ == "__main__":
    main()
