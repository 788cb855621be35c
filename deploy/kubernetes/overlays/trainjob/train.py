"""A small data-parallel training over squinchcomm: replace it with yours. Any launcher of torch programs will do."""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import squinchcomm.torch  # noqa: F401 - makes the backend known; torch 2.14 and later find it without


def main() -> None:
    """Learns a rotation of random vectors; rank 0 tells how it goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()

    dist.init_process_group("squinch")
    torch.manual_seed(0)
    width = options.width
    layers = [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(1 + dist.get_rank())
    rotation = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(0)))[0]
    began = time.perf_counter()
    for step in range(1, options.steps + 1):
        inputs = torch.randn(32, width, generator=random)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs @ rotation)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step == 1 or step % 20 == 0):
            step_ms = (time.perf_counter() - began) / step * 1e3
            print(f"step {step}: loss {loss.item():.4f}, {step_ms:.0f} ms a step, {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
