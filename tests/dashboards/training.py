"""The job of the live test: a training with lossless, compressed and non-finite traffic, which fails when it is told to.

A file in the folder that is its argument tells it what to do next:

    overflow    one step has an infinity in the gradients of rank 1
    fail        ranks make different calls; they stay, so that the failure can be read of them
    stop        ranks end
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import squinchcomm.torch
from squinchcomm.errors import SquinchError

WIDTH = 192  # a layer's gradients are 144 KiB: enough to be compressed
SLOW_RANK, SLOW_S = 3, 0.1
OVERFLOWING_RANK = 1
GO_ON, OVERFLOW, FAIL = range(3)


class Training:
    """Two models of one shape: one leaves its gradients to the backend, the other to the hook with error feedback."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        self.models = [DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        state = squinchcomm.torch.CompressState("squinch6", error_feedback=True, module=self.models[1])
        self.models[1].register_comm_hook(state, squinchcomm.torch.compress_hook)
        self.random = torch.Generator().manual_seed(self.rank)

    def step(self, overflow: bool) -> None:
        inputs = torch.randn(16, WIDTH, generator=self.random)
        if self.rank == SLOW_RANK:
            time.sleep(SLOW_S)
        for model in self.models:
            loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
            model.zero_grad()
            (loss * torch.inf if overflow and self.rank == OVERFLOWING_RANK else loss).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            if all(bool(gradient.isfinite().all()) for gradient in gradients):
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.data.sub_(gradient, alpha=0.1)
        dist.all_reduce(torch.zeros(WIDTH))  # asked to be compressed and too small


def command(folder: Path, done: set[str]) -> int:
    """What rank 0 has found in the folder, known to all ranks."""
    found = torch.tensor([GO_ON])
    for name, number in (("overflow", OVERFLOW), ("fail", FAIL)):
        if dist.get_rank() == 0 and name not in done and (folder / name).exists():
            done.add(name)
            found[0] = number
            break
    dist.broadcast(found, 0)
    return int(found)


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("squinch")
    torch.set_num_threads(1)
    training = Training()
    done: set[str] = set()
    try:
        while (what := command(folder, done)) != FAIL:
            training.step(what == OVERFLOW)
        dist.all_reduce(torch.zeros(8 if training.rank else 9))
    except (SquinchError, RuntimeError) as error:
        print(f"failed as told: {type(error).__name__}", flush=True)
    while not (folder / "stop").exists():
        time.sleep(0.1)


if __name__ == "__main__":
    main()
