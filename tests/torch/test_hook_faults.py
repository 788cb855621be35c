"""What a rank that dies or fails in the middle of a backward pass does to the others, and the order of exchanges."""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from squinchcomm.errors import CommunicatorAborted
from squinchcomm.torch import CompressState, compress_hook, hook
from squinchcomm.torch.turnstile import Turnstile
from tests.torch.hook_tools import Sum, gradients_of
from tests.torch.ranks import World, scratch_store

SIZES = [100_000] * 3


def rank_that_may_die(rank: int, backend: str, store: str) -> tuple[str, str, float]:
    dist.init_process_group(backend, rank=rank, world_size=3, init_method=store, timeout=timedelta(seconds=20))
    ddp = DistributedDataParallel(Sum(SIZES), bucket_cap_mb=0.3)
    state = CompressState(error_feedback=True)
    doomed = [False]

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        if doomed[0] and rank == 1 and bucket.index() == 1:
            os._exit(0)
        return compress_hook(state, bucket)

    ddp.register_comm_hook(state, hook)
    for step in range(2):
        ddp(gradients_of(rank, SIZES, step=step)).backward()
    residuals = state.state_dict()["residuals"]
    doomed[0] = True
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as first:
        ddp(gradients_of(rank, SIZES, step=2)).backward()
    took_s = time.monotonic() - begin
    after = state.state_dict()["residuals"]
    assert all(torch.equal(after[name], residuals[name]) for name in residuals)
    with pytest.raises((RuntimeError, CommunicatorAborted)) as second:
        ddp(gradients_of(rank, SIZES, step=3)).backward()
    return str(first.value), str(second.value), took_s


@pytest.mark.parametrize("backend", ["gloo", "squinch"])
def test_the_others_hear_of_a_dead_rank(backend: str, tmp_path: Path) -> None:
    world = World(3, rank_that_may_die, backend, scratch_store(tmp_path, "store"), bare=True)
    results = world.outcomes()
    assert results[1] is None
    for each in (0, 2):
        first, second, took_s = results[each]
        assert took_s < 15.0, results[each]
        assert ("rank 1 was lost" if backend == "squinch" else "did not get a gradient bucket") in first
        assert "an earlier gradient exchange failed" in second or "aborted" in second


def rank_that_may_run_out_of_memory(rank: int, store: str) -> str:
    """In the middle of a bucket of 24 pieces; the words of what it raised, without what may not have been released."""
    hook.PIECE_BYTES = 16 << 10
    dist.init_process_group("squinch", rank=rank, world_size=3, init_method=store, timeout=timedelta(seconds=20))
    ddp, state = DistributedDataParallel(Sum([100_000])), CompressState()
    ddp.register_comm_hook(state, compress_hook)
    ddp(gradients_of(rank, [100_000])).backward()
    fitting, left = state.pool._fitting, [5]

    def exhausted(nbytes: int) -> torch.Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("no room")
        return fitting(nbytes)

    if rank == 1:
        state.pool._fitting = exhausted
    with pytest.raises((RuntimeError, CommunicatorAborted, MemoryError)) as failed:
        ddp(gradients_of(rank, [100_000], step=1)).backward()
    until = time.monotonic() + 5.0
    while state.pool._out and time.monotonic() < until:
        time.sleep(0.01)
    assert state.pool._out == 0
    with pytest.raises(CommunicatorAborted, match="an earlier gradient exchange failed"):
        state.turnstile.ticket()
    return str(failed.value)


def test_a_rank_that_fails_between_the_pieces_of_a_bucket_exchanges_nothing_more(tmp_path: Path) -> None:
    results = World(3, rank_that_may_run_out_of_memory, scratch_store(tmp_path, "store"), bare=True).outcomes()
    assert results[1] == "no room"
    assert all("rank 1 was lost" in results[each] for each in (0, 2)), results


class Note:
    def __init__(self, number: int, passed: list[Any]) -> None:
        self.number, self.passed = number, passed

    def go(self) -> None:
        self.passed.append(self.number)

    def abandon(self, error: BaseException) -> None:
        self.passed.append((self.number, str(error)))


def test_steps_pass_in_the_order_of_their_tickets() -> None:
    turnstile, passed = Turnstile(), []
    tickets = [turnstile.ticket() for _ in range(20)]
    random.Random(1).shuffle(tickets)
    for ticket in tickets:
        turnstile.ready(ticket, Note(ticket, passed))
    assert passed == list(range(20))


def test_nothing_passes_after_a_failure() -> None:
    turnstile, passed = Turnstile(), []
    tickets = [turnstile.ticket() for _ in range(4)]
    for ticket in (tickets[0], tickets[2]):
        turnstile.ready(ticket, Note(ticket, passed))
    turnstile.fail(ValueError("lost"))
    turnstile.ready(tickets[3], Note(3, passed))
    turnstile.ready(tickets[1], Note(1, passed))
    assert passed == [0, (2, "lost"), (3, "lost"), (1, "lost")]
    with pytest.raises(CommunicatorAborted, match="lost"):
        turnstile.ticket()
