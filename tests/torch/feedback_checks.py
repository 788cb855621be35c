"""What error feedback and checkpoints of the communication hook must do, seen from one rank. Run by test_hook.py."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from squinchcomm.errors import ConfigError
from squinchcomm.torch import CompressState
from tests.torch.hook_tools import Sum, backward, gradients_of, hooked, rank, size, wrapped


def check_error_feedback_sums_to_the_truth() -> None:
    """The mean over many steps of equal gradients tends to the exact mean; without feedback the error stays."""
    sizes, steps = [30_000, 300, 20_000], 40
    own = gradients_of(rank(), sizes)
    errors = {}
    for feedback in (False, True):
        ddp, _ = hooked(wrapped(sizes, bucket_cap_mb=0.1), error_feedback=feedback)
        totals = [torch.zeros(count, dtype=torch.float64) for count in sizes]
        for _ in range(steps):
            for total, mean in zip(totals, backward(ddp, own), strict=True):
                total += mean
        oracle = torch.cat(
            [torch.stack([gradients_of(each, sizes)[i].double() for each in range(size())]).mean(0) for i in range(3)]
        )
        errors[feedback] = ((torch.cat(totals) / steps - oracle).norm() / oracle.norm()).item()
    assert errors[False] > 0.04 and errors[True] < 0.1 * errors[False], errors


def check_error_feedback_loses_nothing() -> None:
    """What was handed out plus all ranks' residuals is what was put in, to float32 rounding, over a rebuild of buckets."""
    sizes = [9_000, 30_000, 20_000]
    ddp, state = hooked(wrapped(sizes, bucket_cap_mb=0.1), error_feedback=True)
    given, handed = (
        [torch.zeros(count, dtype=torch.float64) for count in sizes],
        [torch.zeros(count, dtype=torch.float64) for count in sizes],
    )
    for step in range(5):
        means = backward(ddp, gradients_of(rank(), sizes, step=step))
        for place in range(3):
            handed[place] += means[place].double() * size()
            given[place] += sum(gradients_of(each, sizes, step=step)[place].double() for each in range(size()))
    by_shape = {tuple(piece.shape): piece.double() for piece in state.state_dict()["residuals"].values()}
    for place, count in enumerate(sizes):
        left = by_shape[(count,)].clone()
        dist.all_reduce(left)
        assert left.norm() > 0.01 * given[place].norm() / 5
        assert torch.allclose(handed[place] + left, given[place], rtol=1e-5, atol=1e-5 * given[place].abs().max().item())


def check_error_feedback_survives_a_checkpoint() -> None:
    sizes = [9_000, 30_000, 20_000]

    def make() -> tuple[DistributedDataParallel, CompressState]:
        model = Sum(sizes)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.1)
        return hooked(ddp, error_feedback=True, module=ddp, codec="squinch6-sr")

    ddp, state = make()
    for step in range(3):
        backward(ddp, gradients_of(rank(), sizes, step=step))
    buffer = io.BytesIO()
    torch.save(state.state_dict(), buffer)
    assert set(state.state_dict()["residuals"]) == {"weights.0", "weights.1", "weights.2"}
    want = [[mean.clone() for mean in backward(ddp, gradients_of(rank(), sizes, step=step))] for step in (3, 4)]

    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    ddp, state = make()
    state.load_state_dict(saved)
    # The new DDP has its buckets rebuilt after this step, so that shards, and with them bits, differ until then.
    backward(ddp, gradients_of(rank(), sizes, step=3))
    assert set(state.state_dict()["residuals"]) == {"weights.0", "weights.1", "weights.2"}

    ddp, state = make()
    backward(ddp, gradients_of(rank(), sizes))  # rebuilds
    backward(ddp, gradients_of(rank(), sizes))
    state.load_state_dict(saved)
    for step, means in zip((3, 4), want, strict=True):
        for mean, before in zip(backward(ddp, gradients_of(rank(), sizes, step=step)), means, strict=True):
            assert torch.equal(mean, before)


def check_checkpoints_that_do_not_fit() -> None:
    ddp, state = hooked(wrapped([20_000]), error_feedback=True)
    backward(ddp, gradients_of(rank(), [20_000]))
    saved = state.state_dict()
    for change, message in (
        ({"world_size": 99}, "world_size"),
        ({"rank": 98}, "one file a rank"),
        ({"version": 7}, "version"),
    ):
        with pytest.raises(ConfigError, match=message):
            CompressState(error_feedback=True).load_state_dict({**saved, **change})
    with pytest.raises(ConfigError, match="error_feedback is off"):
        CompressState().load_state_dict(saved)
    with pytest.raises(ConfigError, match="which the module has not"):
        CompressState(error_feedback=True, module=Sum([20_000])).load_state_dict(saved)
    with pytest.raises(ConfigError, match=r"no residuals of 'weights\.1'"):
        CompressState(error_feedback=True, module=Sum([5, 5])).load_state_dict(
            {**saved, "residuals": {"weights.0": torch.zeros(5)}}
        )
    with pytest.raises(ConfigError, match=r"shape \(6,\), the parameter \(5,\)"):
        CompressState(error_feedback=True, module=Sum([5])).load_state_dict(
            {**saved, "residuals": {"weights.0": torch.zeros(6)}}
        )


def check_steps_that_are_not_finite_leave_residuals() -> None:
    sizes = [30_000, 30_000]
    ddp, state = hooked(wrapped(sizes, bucket_cap_mb=0.1), error_feedback=True)
    for step in range(2):
        backward(ddp, gradients_of(rank(), sizes, step=step))
    before = copy.deepcopy(state.state_dict()["residuals"])
    own = gradients_of(rank(), sizes, step=2)
    if rank() == 0:
        own[1][5] = float("inf")  # in one of the buckets: the step as a whole does not count
    backward(ddp, own)
    after = state.state_dict()["residuals"]
    assert before.keys() == after.keys() and len(before) == 2
    assert all(torch.equal(before[name], after[name]) and before[name].any() for name in before)
    backward(ddp, gradients_of(rank(), sizes, step=3))
    assert not torch.equal(state.state_dict()["residuals"]["0"], before["0"])
