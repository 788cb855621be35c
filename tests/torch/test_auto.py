"""The codec "auto" through torch: group, options and guards."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torch.ranks import run_ranks

torch = pytest.importorskip("torch")
dist = torch.distributed


def calls(rank: int) -> Any:
    from squinchcomm.torch import compressed, lossless

    comm = dist.group.WORLD.communicator
    slow = torch.randn(1 << 20)  # 4 MiB over an emulated link of 100 Mb/s: 40 times the time that encoding takes
    dist.all_reduce(slow)
    assert comm.stats.compressed == 1
    for guard in (compressed(), compressed("auto"), compressed("squinch6")):
        with guard:
            before = comm.stats.compressed
            dist.all_reduce(slow)
            assert comm.stats.compressed == before + 1
            dist.all_reduce(torch.ones(1 << 20, dtype=torch.int64))
            assert comm.stats.compressed == before + 1
    with lossless():
        dist.all_reduce(slow)
    part = dist.new_group([0, 1])
    dist.all_reduce(slow, group=part)
    return comm.stats.compressed, dict(comm.stats.uncompressed), repr(comm.crossover)


def test_groups_and_guards() -> None:
    first, second = run_ranks(2, calls, codec="auto", link_rate="100Mbit")
    assert first == second
    assert first[0] == 4 and first[1] == {"dtype": 3, "guard": 1}
