"""Ranks that make different calls, die, or send nonsense: errors that name them, on all ranks, never a hang."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from squinchcomm.errors import MismatchError, PeerLost
from tests.torch.ranks import World, run_ranks

torch = pytest.importorskip("torch")
dist = torch.distributed


def pairs() -> list[tuple[str, Any, Any, str]]:
    """Name, what rank 0 calls, what the others call, words that the error has, each call's."""
    return [
        (
            "operation",
            lambda g: dist.all_reduce(torch.ones(4), group=g),
            lambda g: dist.barrier(group=g),
            "allreduce / barrier",
        ),
        (
            "shape",
            lambda g: dist.all_reduce(torch.ones(4), group=g),
            lambda g: dist.all_reduce(torch.ones(2, 2), group=g),
            "1-d shape / 2-d shape",
        ),
        (
            "dtype",
            lambda g: dist.all_reduce(torch.ones(4), group=g),
            lambda g: dist.all_reduce(torch.ones(4, dtype=torch.float64), group=g),
            "float32 / float64",
        ),
        (
            "reduction",
            lambda g: dist.all_reduce(torch.ones(4), group=g),
            lambda g: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX, group=g),
            "sum / max",
        ),
        (
            "factor or none",
            lambda g: dist.all_reduce(torch.ones(4), group=g),
            lambda g: dist.all_reduce(torch.ones(4), dist._make_nccl_premul_sum(2.0), group=g),
            "sum / premul_sum",
        ),
        (
            "root",
            # Its root has sent and is done; it hears of it in its next call.
            lambda g: (dist.broadcast(torch.ones(4), 0, group=g), dist.barrier(group=g)),
            lambda g: (dist.broadcast(torch.ones(4), 1, group=g), dist.barrier(group=g)),
            "broadcast",
        ),
        ("codec", _compressed, lambda g: dist.all_reduce(torch.ones(50_000), group=g), "squinch6"),
        (
            "order, asynchronous",
            lambda g: (
                dist.all_reduce(torch.ones(4), group=g, async_op=True),
                dist.all_gather([torch.ones(4)] * 3, torch.ones(4), group=g, async_op=True),
            )[1].wait(),
            lambda g: (
                dist.all_gather([torch.ones(4)] * 3, torch.ones(4), group=g, async_op=True),
                dist.all_reduce(torch.ones(4), group=g, async_op=True),
            )[0].wait(),
            "",
        ),
        (
            "sizes",
            lambda g: dist.all_gather([torch.ones(4)] * 3, torch.ones(4), group=g),
            lambda g: dist.all_gather([torch.ones(5)] * 3, torch.ones(5), group=g),
            "12 elements / 15 elements",
        ),
    ]


def _compressed(group: Any) -> None:
    from squinchcomm.torch import compressed

    with compressed("squinch6"):
        dist.all_reduce(torch.ones(50_000), group=group)


def mismatches(rank: int) -> dict[str, str]:
    texts = {}
    for name, first, other, words in pairs():
        group = dist.new_group()
        with pytest.raises(RuntimeError) as caught:
            (first if rank == 0 else other)(group)
        error = caught.value
        assert isinstance(error, MismatchError) or "MismatchError" in str(error), (name, repr(error))
        assert all(word in str(error) for word in words.split(" / ")), (name, str(error))
        texts[name] = str(error)
    dist.barrier()
    return texts


def killed(rank: int, asynchronous: bool) -> float:
    """Rank 1 dies in the middle; returns the seconds until this rank knew."""
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 1 was lost") as caught:
        dist.all_reduce(tensor, async_op=True).get_future().wait() if asynchronous else dist.all_reduce(tensor)
    assert isinstance(caught.value, dist.DistError) and caught.value.peer == 1
    return time.monotonic() - started - 0.3


def test_mismatched_calls_are_named_on_all_ranks() -> None:
    for texts in run_ranks(3, mismatches, compress="explicit"):
        for name, text in texts.items():
            assert "rank 0" in text and ("rank 1" in text or "rank 2" in text), (name, text)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_killed_rank_is_named(asynchronous: bool) -> None:
    results = World(3, killed, asynchronous, init={}).outcomes()
    assert results[1] is None
    for rank in (0, 2):
        assert isinstance(results[rank], float), results[rank]
        assert results[rank] < 1.0 + 0.5


def killed_while_others_train(rank: int) -> str:
    """Rank 1 dies between two steps; returns what the others' backward raises. DDP waits for futures in C++."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    model(torch.ones(2, 256)).sum().backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 256)).sum().backward()
    return str(caught.value)


def test_backward_of_ddp_names_a_killed_rank() -> None:
    results = World(3, killed_while_others_train, init={}).outcomes()
    assert results[1] is None
    for rank in (0, 2):
        assert "PeerLost" in results[rank] and "rank 1 was lost" in results[rank], results[rank]
