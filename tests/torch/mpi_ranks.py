"""One rank of test_mpi_transport.py, under mpirun: the torch backend over MPI. Argument: a file for the store."""

import os
import sys

import torch
import torch.distributed as dist

import squinchcomm.torch

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
ranks = int(os.environ["OMPI_COMM_WORLD_SIZE"])
options = squinchcomm.torch.Options(transport="mpi")
dist.init_process_group("squinch", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=ranks, pg_options=options)
exact = torch.full((1000,), float(rank))
dist.all_reduce(exact)
assert exact[0] == sum(range(ranks))
dist.all_reduce(torch.randn(100_000))
stats = dist.group.WORLD.communicator.stats
assert stats.compressed == 1 and repr(dist.group.WORLD.communicator).endswith("mpi, open>")
pair = dist.new_group([1, 2])
if rank in (1, 2):
    dist.all_reduce(exact, group=pair, async_op=True).wait()
    assert exact[0] == 2 * sum(range(ranks))
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} is done", flush=True)
