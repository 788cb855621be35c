"""What the communication hook must do, error feedback apart, seen from one rank. Run by test_hook.py in worlds of several processes."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from squinchcomm.collectives.plan import Plan
from squinchcomm.errors import ConfigError
from squinchcomm.torch import CompressState, compress_hook, hook
from squinchcomm.torch.exchange import MAX_IN_FLIGHT, SlotPool
from tests.torch.hook_tools import (
    assert_same_on_all_ranks,
    backward,
    expected,
    gradients_of,
    hooked,
    plain,
    rank,
    size,
    wrapped,
)


def check_against_the_numpy_codec_and_the_oracle() -> None:
    sizes = [70_001]
    for dtype, error in ((torch.float32, 0.072), (torch.bfloat16, 0.074), (torch.float16, 0.073), (torch.float64, 0.072)):
        for as_view in (False, True):
            ddp, state = hooked(wrapped(sizes, dtype, gradient_as_bucket_view=as_view))
            for step in range(2):
                [mean] = backward(ddp, gradients_of(rank(), sizes, dtype, step))
                everyones = [gradients_of(each, sizes, dtype, step)[0] for each in range(size())]
                want = expected([plain(each) for each in everyones])
                assert plain(mean).tobytes() == want.tobytes()
                oracle = torch.stack([each.double() for each in everyones]).mean(0)
                largest = torch.stack([each.double() for each in everyones]).abs().max()
                assert (mean.double() - oracle).abs().max() <= 2 * error * largest
                noise = (mean.double() - oracle).square().mean()
                assert 10 * torch.log10(oracle.square().mean() / noise) > 23.0
            assert state.buckets == {"compressed": 2}
            assert_same_on_all_ranks([mean])


def check_buckets_larger_than_a_piece() -> None:
    """More pieces than are under way at once, the last one short; with residuals nothing is lost in the long run."""
    count, piece = 70_001, 12 << 10
    own = gradients_of(rank(), [count])
    everyones = [gradients_of(each, [count])[0] for each in range(size())]
    whole, hook.PIECE_BYTES = hook.PIECE_BYTES, piece
    try:
        [mean] = backward(hooked(wrapped([count]))[0], own)
        ddp, _ = hooked(wrapped([count]), error_feedback=True)
        total = torch.stack([backward(ddp, own)[0].double() for _ in range(40)]).sum(0)
    finally:
        hook.PIECE_BYTES = whole
    bounds = Plan.even(count, round(4 * count / piece), 4, 512).bounds
    assert len(bounds) - 1 > 2 * MAX_IN_FLIGHT
    want = [expected([plain(each[start:stop]) for each in everyones]) for start, stop in pairwise(bounds)]
    assert plain(mean).tobytes() == np.concatenate(want).tobytes()
    oracle = torch.stack([each.double() for each in everyones]).mean(0)
    assert (total / 40 - oracle).norm() < 0.1 * (mean.double() - oracle).norm()
    assert_same_on_all_ranks([mean, total])


def check_other_codecs() -> None:
    for codec, at_least_db in (("bf16", 48.0), ("int8", 35.0), ("squinch6-sr", 19.0)):
        ddp, _ = hooked(wrapped([30_000]), codec=codec)
        [mean] = backward(ddp, gradients_of(rank(), [30_000]))
        oracle = torch.stack([gradients_of(each, [30_000])[0].double() for each in range(size())]).mean(0)
        noise = (mean.double() - oracle).square().mean()
        assert 10 * torch.log10(oracle.square().mean() / noise) > at_least_db, codec
        assert_same_on_all_ranks([mean])
    averages = []
    for _ in range(60):
        averages.append(backward(ddp, gradients_of(rank(), [30_000]))[0].clone())
    assert not torch.equal(averages[0], averages[1])
    noise = (torch.stack(averages).double().mean(0) - oracle).square().mean()
    assert 10 * torch.log10(oracle.square().mean() / noise) > at_least_db + 14  # it is unbiased


def check_wire_bytes_and_counts() -> None:
    ddp, state = hooked(wrapped([1 << 20]), min_compress_bytes=64 << 10)
    backward(ddp, gradients_of(rank(), [1 << 20]))
    per_element = state.wire_bytes * 8 / (1 << 20) / (2 * (size() - 1) / size())
    assert 6.0 <= per_element < 6.05
    assert state.raw_bytes == 4 << 20


def check_many_buckets_and_rebuild() -> None:
    sizes = [40_000, 7, 90_000, 513, 65_536, 1]
    for as_view in (False, True):
        ddp, state = hooked(wrapped(sizes, bucket_cap_mb=0.3, gradient_as_bucket_view=as_view))
        for step in range(4):
            means = backward(ddp, gradients_of(rank(), sizes, step=step))
            assert_same_on_all_ranks(means)
            for place, mean in enumerate(means):
                everyones = [gradients_of(each, sizes, step=step)[place].double() for each in range(size())]
                oracle = torch.stack(everyones).mean(0)
                # A block may hold two parameters where they meet, a hundred times apart; so whole tensors are compared.
                if mean.numel() > 1000:
                    assert (mean.double() - oracle).norm() <= 0.1 * oracle.norm()
        assert state.buckets == {"compressed": 1 + 3 * 2}


def check_more_buckets_than_may_be_under_way() -> None:
    sizes = [20_000] * 14
    for feedback in (False, True):
        ddp, state = hooked(wrapped(sizes, bucket_cap_mb=0.05), error_feedback=feedback)
        for step in range(3):
            means = backward(ddp, gradients_of(rank(), sizes, step=step))
        oracle = [
            torch.stack([gradients_of(each, sizes, step=2)[i].double() for each in range(size())]).mean(0) for i in range(14)
        ]
        assert all((mean.double() - exact).norm() <= 0.2 * exact.norm() for mean, exact in zip(means, oracle, strict=True))
        assert state.buckets == {"compressed": 1 + 14 + 14}  # DDP begins with a single bucket
        assert len(state.pool._free) <= MAX_IN_FLIGHT, [(memory.numel(), memory.data_ptr()) for memory in state.pool._free]


def check_small_buckets_are_lossless() -> None:
    for count, settings, reason in ((100, {"min_compress_bytes": 401}, "small"), (100_000, {"codec": "none"}, "lossless")):
        ddp, state = hooked(wrapped([count]), **settings)
        [mean] = backward(ddp, gradients_of(rank(), [count]))
        oracle = torch.stack([gradients_of(each, [count])[0].double() for each in range(size())]).mean(0)
        assert torch.allclose(mean.double(), oracle, rtol=1e-5, atol=1e-8)
        assert state.buckets == {reason: 1} and state.wire_bytes == 0


def check_not_finite_stays_not_finite_everywhere() -> None:
    last = size() - 1
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for value in (float("inf"), float("-inf"), float("nan")):
            for at in (0, 29_999):
                own = gradients_of(rank(), [30_000], dtype)
                if rank() == last:
                    own[0][at] = value
                ddp, _ = hooked(wrapped([30_000], dtype))
                # 0 * inf is not a number, so the loss is not, but the gradient is what was given.
                [mean] = backward(ddp, own)
                assert not torch.isfinite(mean[at]), (dtype, value)
                assert torch.isfinite(mean).sum() >= 29_000
                assert_same_on_all_ranks([torch.nan_to_num(mean, nan=12345.0)])


def check_zeros_and_magnitudes() -> None:
    for factor in (0.0, 1e-30, 1e30):
        ddp, _ = hooked(wrapped([20_000]))
        own = [gradients_of(rank(), [20_000])[0] * factor]
        [mean] = backward(ddp, own)
        oracle = torch.stack([gradients_of(each, [20_000])[0].double() * factor for each in range(size())]).mean(0)
        assert (mean.double() - oracle).norm() <= 0.1 * oracle.norm()


def check_unused_parameters() -> None:
    sizes = [30_000, 30_000, 30_000]
    ddp, _ = hooked(wrapped(sizes, find_unused_parameters=True))
    for step in range(3):
        # Parameter 2 is used by nobody, parameter 1 by rank 0 alone.
        means = backward(ddp, gradients_of(rank(), sizes, step=step), used=[0, 1] if rank() == 0 else [0])
        assert means[2] is None or not means[2].any()
        only = gradients_of(0, sizes, step=step)[1].double() / size()
        assert (
            means[1].double() - only
        ).norm() <= 0.1 * only.norm()  # twice the 4.8 % of one encoding, as its errors may add up
        assert_same_on_all_ranks(means[:2])


def check_no_sync_accumulates() -> None:
    ddp, state = hooked(wrapped([50_000]))
    first, second = gradients_of(rank(), [50_000]), gradients_of(rank(), [50_000], step=1)
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(first).backward()
    assert not state.buckets
    ddp(second).backward()
    sums = [gradients_of(each, [50_000])[0] + gradients_of(each, [50_000], step=1)[0] for each in range(size())]
    assert plain(ddp.module.weights[0].grad).tobytes() == expected([plain(each) for each in sums]).tobytes()


def check_uneven_inputs() -> None:
    ddp, state = hooked(wrapped([40_000, 40_000], bucket_cap_mb=0.1), error_feedback=True)
    with ddp.join():
        for step in range(2 if rank() == 0 else 4):
            means = backward(ddp, gradients_of(rank(), [40_000, 40_000], step=step))
    if rank() != 0:
        oracle = sum(gradients_of(each, [40_000, 40_000], step=3)[1].double() for each in range(1, size())) / size()
        assert (means[1].double() - oracle).norm() <= 0.2 * oracle.norm()
    assert state.buckets["compressed"] >= 4


def check_groups_of_some_ranks() -> None:
    alone, most = dist.new_group([0]), dist.new_group(list(range(1, size())))
    members = [0] if rank() == 0 else list(range(1, size()))
    group = alone if rank() == 0 else most
    ddp, state = hooked(wrapped([40_000], process_group=group), process_group=group)
    [mean] = backward(ddp, gradients_of(rank(), [40_000]))
    if len(members) == 1:
        assert torch.equal(mean, gradients_of(rank(), [40_000])[0]) and state.buckets == {"one rank": 1}
    else:
        want = expected([plain(gradients_of(each, [40_000])[0]) for each in members])
        assert plain(mean).tobytes() == want.tobytes()
    dist.barrier()


def check_groups_that_overlap() -> None:
    """Ranks then belong to different numbers of groups, and still meet in later ones."""
    pairs = [[0, 1], [1, 2]][: size() - 1]
    for pair, group in [(pair, dist.new_group(pair)) for pair in pairs]:
        if rank() in pair:
            ddp, _ = hooked(wrapped([40_000], process_group=group), process_group=group)
            [mean] = backward(ddp, gradients_of(rank(), [40_000]))
            assert plain(mean).tobytes() == expected([plain(gradients_of(each, [40_000])[0]) for each in pair]).tobytes()
    ddp, _ = hooked(wrapped([40_000], process_group=dist.new_group()))
    [mean] = backward(ddp, gradients_of(rank(), [40_000]))
    assert plain(mean).tobytes() == expected([plain(gradients_of(each, [40_000])[0]) for each in range(size())]).tobytes()


def check_overlap_with_backward() -> None:
    """Buckets leave while backward goes on: on one slow rank nothing waits but the end."""
    took: list[float] = []

    def timed(state, bucket):  # type: ignore[no-untyped-def]
        begin = time.perf_counter()
        if rank() == 0 and bucket.index() == 0:
            time.sleep(0.5)
        future = compress_hook(state, bucket)
        took.append(time.perf_counter() - begin)
        return future

    sizes = [200_000] * 3
    ddp, _ = hooked(wrapped(sizes, bucket_cap_mb=0.5), timed)
    backward(ddp, gradients_of(rank(), sizes))
    backward(ddp, gradients_of(rank(), sizes))
    took.clear()
    dist.barrier()
    begin = time.perf_counter()
    backward(ddp, gradients_of(rank(), sizes))
    whole = time.perf_counter() - begin
    assert len(took) == 3 and whole >= 0.45
    if rank() != 0:
        assert sum(took) < 0.25, took


def check_scratch_memory() -> None:
    ddp, state = hooked(wrapped([1 << 20]))
    for step in range(3):
        backward(ddp, gradients_of(rank(), [1 << 20], step=step))
    held = sum(memory.numel() for memory in state.pool._free)
    assert held <= 0.376 * (4 << 20), held  # of one bucket of float32, and as much was there after the first step
    assert len(state.pool._free) == 1


def check_peak_memory() -> None:
    """A step that has to make all its buffers takes at most half a bucket more than one of DDP without a hook."""
    count, extra = 8 << 20, {}
    own = gradients_of(rank(), [count])
    for name in ("plain", "hooked"):
        ddp = wrapped([count], bucket_cap_mb=1000, gradient_as_bucket_view=True)
        state = hooked(ddp)[1] if name == "hooked" else None
        for _ in range(2):
            backward(ddp, own)
        if state is not None:
            state.pool = SlotPool()
        Path("/proc/self/clear_refs").write_text("5")  # forgets the highest memory so far
        before = memory_bytes("VmRSS")
        backward(ddp, own)
        extra[name] = memory_bytes("VmHWM") - before
    assert extra["hooked"] - extra["plain"] <= 0.5 * 4 * count, extra


def memory_bytes(field: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def check_two_models_in_one_backward() -> None:
    sizes = [60_000, 60_000]
    one, _ = hooked(wrapped(sizes, bucket_cap_mb=0.2))
    two, _ = hooked(wrapped(sizes, bucket_cap_mb=0.2))
    for step in range(3):
        own = gradients_of(rank(), sizes, step=step)
        one.zero_grad(), two.zero_grad()
        (one(own) + two(own)).backward()
        for first, second in zip(one.module.weights, two.module.weights, strict=True):
            assert torch.equal(first.grad, second.grad) and first.grad.any()


def check_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="unknown codec"):
        CompressState(codec="squinch7")
    with pytest.raises(ConfigError, match="min_compress_bytes"):
        CompressState(min_compress_bytes=-1)
    with pytest.raises(ConfigError, match="process_group"):
        CompressState(process_group="world")
    ddp = wrapped([20_000])
    ddp.register_comm_hook(None, compress_hook)
    with pytest.raises(ConfigError, match="pass a CompressState"):
        backward(ddp, gradients_of(rank(), [20_000]))


def check_convergence() -> None:
    """200 steps of a small model: the same parameters on all ranks, and a loss like that of exact averages."""
    generator = torch.Generator().manual_seed(7)
    teacher = torch.randn(32, 4, generator=generator)
    losses = {}
    for name, settings in (("exact", None), ("squinch6", {}), ("feedback", {"error_feedback": True})):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
        ddp = DistributedDataParallel(model)
        if settings is not None:
            hooked(ddp, **settings)
        optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-3)
        data = torch.Generator().manual_seed(100 + rank())
        for _ in range(200):
            inputs = torch.randn(32, 32, generator=data)
            loss = (ddp(inputs) - torch.tanh(inputs @ teacher)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert_same_on_all_ranks(list(ddp.parameters()))
        test = torch.randn(1000, 32, generator=torch.Generator().manual_seed(5))
        losses[name] = (model(test) - torch.tanh(test @ teacher)).square().mean().item()
    assert losses["exact"] < 0.25
    assert abs(losses["squinch6"] / losses["exact"] - 1) < 0.03, losses
    assert abs(losses["feedback"] / losses["exact"] - 1) < 0.03, losses
