"""The mpi transport beside MPI itself, on the same ranks, in one run.

    mpirun -n 4 python benchmarks/mpi.py                        # both parts, about a minute
    mpirun -n 4 python benchmarks/mpi.py --sizes 64K 64M --repeats 20 -J mpi.json

Part 1, the transport: every rank sends frames to every other, takes theirs and releases them; against it, the same bytes with
nothing but Isend and Irecv into receives that are posted before. Part 2, all-reduce: MPI_Allreduce of float32, and squinchcomm
without compression and with 6 bits, which work in place on a copy that is made before the clock starts. Contenders take turns,
repeat by repeat; a repeat lasts until the slowest rank is done; a ratio is that of one repeat, then the median and quartiles of
all. The first result of every all-reduce is compared with a float64 sum.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
from mpi4py import MPI

import squinchcomm
from squinchcomm.config import parse_size
from squinchcomm.transport.base import Transport
from squinchcomm.transport.mpi_backend import MpiBackend
from squinchcomm.transport.mpi_world import join_world
from squinchcomm.transport.options import TransportOptions

Call = Callable[[], object]

WORLD = MPI.COMM_WORLD
OTHERS = [(WORLD.rank + step) % WORLD.size for step in range(1, WORLD.size)]
TOLERANCE = {"MPI_Allreduce": 1e-5, "gloo-f32": 1e-5, "none": 1e-5, "squinch6": 0.1}  # root mean square, relative
HEADER_BYTES = 80  # of a frame and its prefix
WINDOW = 8  # as communicators have it
WARMUP = 3


def turns(contenders: dict[str, Call], repeats: int, prepare: Call | None = None) -> dict[str, list[float]]:
    """Seconds of each contender in each repeat, of its slowest rank; the same on all ranks. `prepare` runs before each call, untimed."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(-WARMUP, repeats):
        for name, call in contenders.items():
            if prepare is not None:
                prepare()
            WORLD.Barrier()
            start = time.perf_counter()
            call()
            took = slowest(time.perf_counter() - start)
            if repeat >= 0:
                times[name].append(took)
    return times


def slowest(seconds: float) -> float:
    """The largest of all ranks' times."""
    most = np.zeros(1)
    WORLD.Allreduce(np.array([seconds]), most, MPI.MAX)
    return float(most[0])


def row(part: str, nbytes: int, name: str, times: list[float], base: list[float]) -> dict[str, Any]:
    """One line of the table; `speed` is the base's time over this one's."""
    low, speed, high = quantiles([b / t for b, t in zip(base, times, strict=True)])
    return {
        "part": part,
        "bytes": nbytes,
        "name": name,
        "us": quantiles(times)[1] * 1e6,
        "speed": speed,
        "low": low,
        "high": high,
    }


def make_transport() -> Transport:
    """This rank's end of a transport between all ranks, whose payloads go through MPI as they do between hosts."""
    world = join_world(None, 60.0)
    listener = MpiBackend(TransportOptions(window=WINDOW, shared_memory=False), world).listen()
    return listener.connect(world.rank, world.exchange(listener.address, 60.0), 60.0)


def exchange_frames(transport: Transport, payload: np.ndarray, frames: int) -> None:
    """Sends that many frames to every other rank and takes as many from each."""
    due, unsent = frames * len(OTHERS), dict.fromkeys(OTHERS, frames)
    while due or unsent:
        sent = False
        for peer in tuple(unsent):
            if transport.can_send(peer):
                transport.send(peer, b"-" * 56, payload, borrow=True)
                sent = True
                unsent[peer] -= 1
                if not unsent[peer]:
                    del unsent[peer]
        frame = transport.recv(0 if sent else 0.25)
        if frame is not None:
            frame.release()
            due -= 1
    transport.flush(10.0)


def exchange_raw(payload: np.ndarray, receives: list[np.ndarray], frames: int) -> None:
    """The same messages with nothing but MPI: a header and a payload for every frame, into receives posted before."""
    header, slots = np.zeros(HEADER_BYTES, np.uint8), np.zeros((len(OTHERS) * frames, HEADER_BYTES), np.uint8)
    requests = [WORLD.Irecv(slots[i * frames + j], peer, 1) for i, peer in enumerate(OTHERS) for j in range(frames)]
    requests += [WORLD.Irecv(receives[i * frames + j], peer, 2) for i, peer in enumerate(OTHERS) for j in range(frames)]
    for _ in range(frames):
        for peer in OTHERS:
            requests += [WORLD.Isend(header, peer, 1), WORLD.Isend(payload, peer, 2)]
    MPI.Request.Waitall(requests)


def transport_rows(repeats: int) -> list[dict[str, Any]]:
    """Frames of several sizes through the transport, against MPI alone."""
    rows = []
    transport = make_transport()
    for nbytes, frames in ((64 << 10, 64), (128 << 10, 64), (512 << 10, 32), (3 << 19, 16)):
        payload = np.ones(nbytes, np.uint8)
        receives = [np.zeros(nbytes, np.uint8) for _ in range(frames * len(OTHERS))]
        times = turns(
            {
                "Isend/Irecv": partial(exchange_raw, payload, receives, frames),
                "mpi transport": partial(exchange_frames, transport, payload, frames),
            },
            repeats,
        )
        rows += [row(f"{frames} frames a peer", nbytes, name, times[name], times["Isend/Irecv"]) for name in times]
    transport.close()
    return rows


def allreduce_rows(sizes: list[int], repeats: int, gloo: str | None) -> list[dict[str, Any]]:
    """MPI_Allreduce against squinchcomm over MPI, and gloo meeting at an address if there is one."""
    rows = []
    if gloo is not None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=gloo, rank=WORLD.rank, world_size=WORLD.size)
    with squinchcomm.init(comm=WORLD, transport="mpi") as comm:
        for nbytes in sizes:
            source = np.random.default_rng(WORLD.rank).standard_normal(nbytes // 4).astype(np.float32)
            out = np.empty_like(source)
            contenders: dict[str, Call] = {
                "MPI_Allreduce": partial(WORLD.Allreduce, source, out),
                "none": partial(comm.allreduce, out, codec="none"),
                "squinch6": partial(comm.allreduce, out, codec="squinch6"),
            }
            if gloo is not None:
                contenders["gloo-f32"] = partial(dist.all_reduce, torch.from_numpy(out))
            refill = partial(np.copyto, out, source)
            for name, call in contenders.items():
                refill()
                call()
                check(name, out)
            times = turns(contenders, repeats, refill)
            rows += [row("allreduce", nbytes, name, times[name], times["MPI_Allreduce"]) for name in times]
    return rows


def check(name: str, result: np.ndarray) -> None:
    """Ends the job if a result is wrong."""
    expected = np.zeros(result.size)
    for rank in range(WORLD.size):
        expected += np.random.default_rng(rank).standard_normal(result.size).astype(np.float32)
    error = float(np.linalg.norm(result - expected) / max(float(np.linalg.norm(expected)), 1e-30))
    if not error <= TOLERANCE[name]:
        print(
            f"rank {WORLD.rank}: {name} of {result.size} elements is wrong: relative error {error:.2e}",
            file=sys.stderr,
            flush=True,
        )
        WORLD.Abort(1)


def facts() -> dict[str, str]:
    """What the figures depend on."""
    library = MPI.Get_library_version().replace("\n", " ").split(",")[0][:60].strip()
    versions = f"squinchcomm {squinchcomm.__version__}, {library}, Python {platform.python_version()}, NumPy {np.__version__}"
    return {
        "ranks": f"{WORLD.size} on {platform.node()}, {len(os.sched_getaffinity(0))} cores",
        "versions": versions,
        "load": "{:.1f} {:.1f} {:.1f} before the run".format(*os.getloadavg()),
        "command": " ".join(["mpirun python benchmarks/mpi.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def main() -> None:
    """Measures, prints the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[64 << 10, 1 << 20, 64 << 20], help="bytes of float32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--part", choices=["transport", "allreduce", "both"], default="both")
    parser.add_argument("--gloo", metavar="ADDRESS", help="measure gloo too; its ranks meet there (tcp://HOST:PORT)")
    parser.add_argument("-J", "--json", type=Path)
    options = parser.parse_args()
    known = facts()
    rows = transport_rows(options.repeats) if options.part != "allreduce" else []
    rows += allreduce_rows(options.sizes, options.repeats, options.gloo) if options.part != "transport" else []
    if WORLD.rank != 0:
        return
    for name, value in known.items():
        print(f"# {name}: {value}")
    print("# us: median; speed: time of the first of its group / this time, pair by pair, median and quartiles")
    print(f"# {'part':<20} {'bytes':>9} {'name':<14} {'us':>10} {'speed':>6} {'quartiles':>13}")
    for each in rows:
        spread = f"{each['low']:.2f}..{each['high']:.2f}"
        print(
            f"  {each['part']:<20} {each['bytes']:>9} {each['name']:<14} {each['us']:>10.0f} {each['speed']:>6.2f} {spread:>13}"
        )
    if options.json:
        options.json.write_text(json.dumps({"facts": known, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
