"""What the communication hook must do, seen from one rank. Run by test_hook.py in worlds of several processes."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from squinchcomm.arrays import flatten
from squinchcomm.collectives.plan import Plan
from squinchcomm.errors import ConfigError
from squinchcomm.kernels import squinch6_reference as reference
from squinchcomm.kernels.dtypes import from_float32, to_float32
from squinchcomm.torch import CompressState, compress_hook, hook
from squinchcomm.torch.exchange import MAX_IN_FLIGHT, SlotPool

Tensors = list[torch.Tensor]


class Sum(torch.nn.Module):
    """Its loss is the scalar product of parameters and given vectors, so that gradients are exactly these vectors."""

    def __init__(self, sizes: list[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(size, dtype=dtype) for size in sizes)

    def forward(self, gradients: Tensors, used: list[int] | None = None) -> torch.Tensor:
        places = range(len(self.weights)) if used is None else used
        return torch.stack([(self.weights[i] * gradients[i]).sum() for i in places]).sum()


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def gradients_of(every_rank: int, sizes: list[int], dtype: torch.dtype = torch.float32, step: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(1000 * step + every_rank)
    return [(torch.randn(count, generator=generator) * 10.0 ** (i % 3 - 2)).to(dtype) for i, count in enumerate(sizes)]


def wrapped(sizes: list[int], dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Sum(sizes, dtype), **options)


def hooked(
    ddp: DistributedDataParallel, hook: Callable[..., Any] = compress_hook, **settings: Any
) -> tuple[DistributedDataParallel, CompressState]:
    state = CompressState(**{"min_compress_bytes": 0, **settings})
    ddp.register_comm_hook(state, hook)
    return ddp, state


def backward(ddp: DistributedDataParallel, gradients: Tensors, **forward: Any) -> Tensors:
    ddp.zero_grad()
    ddp(gradients, **forward).backward()
    return [weight.grad for weight in ddp.module.weights]


def plain(tensor: torch.Tensor) -> np.ndarray:
    return flatten(tensor.contiguous(), "tensor", writable=False).data


def expected(contributions: list[np.ndarray]) -> np.ndarray:
    """Average of one bucket by the NumPy reference codec: each rank's array in the buckets' own dtype."""
    ranks, dtype = len(contributions), contributions[0].dtype
    values = [to_float32(each) for each in contributions]
    bounds = Plan.even(values[0].size, ranks, dtype.itemsize, 512).bounds
    parts = []
    for owner in range(ranks):
        shard = slice(bounds[owner], bounds[owner + 1])
        count = shard.stop - shard.start
        total = None
        for each, value in enumerate(values):
            part = value[shard] if each == owner else reference.decode(reference.encode(value[shard]), count)
            total = part if total is None else total + part
        parts.append(reference.decode(reference.encode(total * np.float32(1 / ranks)), count))
    return from_float32(np.concatenate(parts), dtype)


def assert_same_on_all_ranks(tensors: Tensors) -> None:
    flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
    everyones = [torch.empty_like(flat) for _ in range(size())]
    dist.all_gather(everyones, flat)
    assert all(torch.equal(flat, other) for other in everyones)


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
