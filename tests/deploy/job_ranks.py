"""What the jobs of these tests run: every rank adds up arrays with all the others and says who it is and what came out."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import numpy as np

COUNT = 1 << 16  # of float32: 256 KiB, enough to be compressed


def own(rank: int) -> np.ndarray:
    """A rank's gradient."""
    return np.random.default_rng(rank).standard_normal(COUNT, dtype=np.float32)


def say(text: str) -> None:
    """A line in one piece, whoever else writes to the same file."""
    os.write(1, f"{text}\n".encode())


def report(rank: int, world_size: int, ranks: int, mean: np.ndarray) -> None:
    exact = np.mean([own(peer) for peer in range(world_size)], axis=0)
    error = float(np.linalg.norm(mean - exact) / np.linalg.norm(exact))
    place = os.environ.get("LOCAL_RANK") or os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or os.environ.get("SLURM_LOCALID")
    host = socket.gethostname()
    say(f"rank={rank} size={world_size} local={place} host={host} ranks={ranks} error={error:.4f}")


def with_init() -> None:
    import squinchcomm

    with squinchcomm.init() as comm:
        mean, ranks = own(comm.rank), np.array([comm.rank])
        comm.allreduce(mean, "avg", codec="squinch6")
        comm.allreduce(ranks)
        report(comm.rank, comm.world_size, int(ranks[0]), mean)


def with_torch() -> None:
    import torch
    import torch.distributed as dist

    import squinchcomm.torch  # noqa: F401 - registers the backend for torch before 2.14

    dist.init_process_group("squinch")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mean, ranks = torch.from_numpy(own(rank)), torch.tensor([rank])
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    dist.all_reduce(ranks)
    report(rank, world_size, int(ranks[0]), mean.numpy())
    dist.destroy_process_group()


def fail() -> None:
    """One rank ends early; the others would wait for a long time."""
    if os.environ["SLURM_PROCID"] == "1":
        sys.exit(3)
    time.sleep(100)


if __name__ == "__main__":
    say(f"keys={[f'{path.name} {path.stat().st_mode & 0o777:o}' for path in Path.cwd().glob('.*.key')]}")
    {"init": with_init, "torch": with_torch, "fail": fail}[sys.argv[1]]()
