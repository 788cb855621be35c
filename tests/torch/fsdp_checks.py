"""What the FSDP2 adapter and mixed precision must do, seen from one rank. Run by test_fsdp.py in worlds of several processes."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from squinchcomm.errors import ConfigError
from squinchcomm.kernels import get_codec
from squinchcomm.kernels import squinch6_reference as reference
from squinchcomm.torch import CompressState, compress_fsdp, compress_hook
from squinchcomm.torch.exchange import SlotPool
from squinchcomm.torch.fsdp import CompressedAllGather, CompressedReduceScatter, _scale_of, _Settings
from tests.torch.hook_tools import assert_same_on_all_ranks, rank, size

WIDTH = 96


def network(seed: int = 0) -> torch.nn.Sequential:
    """Its first weight has 97 rows and its biases 97 and 5 elements: shards of unequal size, padded by FSDP."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 97), torch.nn.Tanh(), torch.nn.Linear(97, WIDTH), torch.nn.Linear(WIDTH, 5)
    )


def sharded(mesh: Any = None, compress: dict[str, Any] | None = None, **options: Any) -> torch.nn.Sequential:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    if compress is not None:
        compress_fsdp(model, **{"min_compress_bytes": 0, **compress})
    return model


def batch(every_rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(50 * step + every_rank))


def run(model: torch.nn.Module, step: int = 0) -> list[torch.Tensor]:
    """Whole gradients, as float64."""
    model.zero_grad()
    model(batch(rank(), step)).float().square().mean().backward()
    return [each.grad.full_tensor().double() for each in model.parameters()]


def oracle(step: int = 0) -> list[torch.Tensor]:
    model = network().double()
    for each in range(size()):
        (model(batch(each, step).double()).square().mean() / size()).backward()
    return [parameter.grad for parameter in model.parameters()]


def error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    found, wanted = torch.cat([each.reshape(-1) for each in found]), torch.cat([each.reshape(-1) for each in wanted])
    return ((found - wanted).norm() / wanted.norm()).item()


def check_gradients_of_a_model() -> None:
    exact = error(run(sharded()), oracle())
    assert exact < 1e-5
    model = sharded(compress={})
    for step in range(3):
        gradients = run(model, step)
        assert 0.005 < error(gradients, oracle(step)) < 0.06
        assert_same_on_all_ranks(gradients)
    assert error(run(sharded(compress={"codec": "none"})), oracle()) < 1e-5
    assert error(run(sharded(compress={"min_compress_bytes": 1 << 30})), oracle()) < 1e-5
    assert error(run(sharded(compress={"codec": "bf16"})), oracle()) < 3e-3


def check_reduce_scatter_against_the_numpy_codec() -> None:
    count = 1501  # no multiple of a tile
    contributions = [torch.randn(size() * count, generator=torch.Generator().manual_seed(each)) for each in range(size())]
    call = CompressedReduceScatter("squinch6", _Settings(0, SlotPool()), 0)
    shard = slice(rank() * count, (rank() + 1) * count)
    total = None
    for each, values in enumerate(contributions):
        part = values.numpy()[shard]
        part = part if each == rank() else reference.decode(reference.encode(part), count)
        total = part if total is None else total + part
    ops = ((dist.ReduceOp.AVG, 1 / size()), (dist.ReduceOp.SUM, 1.0), (dist._make_nccl_premul_sum(0.25), 0.25))
    for op, factor in ops:
        for async_op in (False, True):
            output = call.allocate((count,), dtype=torch.float32, device=torch.device("cpu"))
            source = contributions[rank()].clone()
            work = call(output, source, dist.group.WORLD, op, async_op=async_op)
            if async_op:
                work.wait()
            assert output.numpy().tobytes() == (total * np.float32(factor)).tobytes()
            assert torch.equal(source, contributions[rank()])
    with pytest.raises(ConfigError, match="summed or averaged"):
        _scale_of(dist.ReduceOp.MAX, size())


def check_reduce_types_and_divide_factors() -> None:
    for param, reduce in (
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, None),
        (None, torch.bfloat16),
    ):
        policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
        seen = []
        model = sharded(compress={}, mp_policy=policy)
        for module in model.modules():
            if hasattr(module, "_get_fsdp_state"):
                [group] = module._get_fsdp_state()._fsdp_param_groups
                group._reduce_scatter_comm = _Recording(group._reduce_scatter_comm, seen)
        gradients = run(model)
        assert set(seen) == {reduce or param}
        assert error(gradients, oracle()) < 0.07
        assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    model = sharded(compress={})
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(2.0 * size())
    assert error([2 * each for each in run(model)], oracle()) < 0.06


class _Recording:
    def __init__(self, inner: Any, seen: list[torch.dtype]) -> None:
        self.inner, self.seen = inner, seen
        self.allocate = inner.allocate

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **rest: Any) -> Any:
        self.seen.append(input_tensor.dtype)
        return self.inner(output_tensor, input_tensor, **rest)


def check_hybrid_sharding() -> None:
    if size() != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh, {"min_compress_bytes": 8192})  # of which the small last layer's are less
    for step in range(3):
        gradients = run(model, step)
        assert 0.02 < error(gradients, oracle(step)) < 0.09
        assert_same_on_all_ranks(gradients)
    compress_fsdp(model, codec="none")
    assert error(run(model), oracle()) < 1e-5
    model = sharded(mesh, {}, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    assert error(run(model), oracle()) < 0.09


def check_gradient_accumulation() -> None:
    model = sharded(compress={})
    model.set_requires_gradient_sync(False)
    model(batch(rank(), 0)).square().mean().backward()
    model.set_requires_gradient_sync(True)
    model(batch(rank(), 1)).square().mean().backward()
    found = [each.grad.full_tensor().double() for each in model.parameters()]
    assert error(found, [a + b for a, b in zip(oracle(0), oracle(1), strict=True)]) < 0.06


def check_not_finite_reaches_its_owner() -> None:
    model = sharded(compress={})
    data = batch(rank())
    if rank() == size() - 1:
        data[0, 0] = float("inf")
    model(data).square().mean().backward()
    assert not all(torch.isfinite(each.grad.full_tensor()).all() for each in model.parameters())


def check_all_gather_of_parameters() -> None:
    for codec, most in (("bf16", 0.01), ("int8", 0.02), ("squinch6", 0.3)):
        model = sharded(compress={"codec": "none", "all_gather_codec": codec})
        gradients = run(model)
        assert 1e-5 < error(gradients, oracle()) < most, codec
        assert_same_on_all_ranks(gradients)
        exact = [parameter.full_tensor() for parameter in model.parameters()]
        assert all(torch.equal(mine, given) for mine, given in zip(exact, network().parameters(), strict=True))
    own = torch.randn(1500, generator=torch.Generator().manual_seed(rank()))
    call = CompressedAllGather("squinch6", _Settings(0, SlotPool()))
    for async_op in (False, True):
        output = call.allocate((1500 * size(),), dtype=torch.float32, device=torch.device("cpu"))
        mine = output[1500 * rank() : 1500 * (rank() + 1)].copy_(own)
        work = call(output, mine, dist.group.WORLD, async_op)
        if async_op:
            work.wait()
        for each in range(size()):
            values = torch.randn(1500, generator=torch.Generator().manual_seed(each)).numpy()
            want = reference.decode(reference.encode(values), 1500)
            assert output[1500 * each : 1500 * (each + 1)].numpy().tobytes() == want.tobytes()
    with pytest.raises(ConfigError, match="forward and backward would see different parameters"):
        compress_fsdp(sharded(), all_gather_codec="squinch6-sr")


def check_bad_models_and_log_lines() -> None:
    with pytest.raises(ConfigError, match="fully_shard on it first"):
        compress_fsdp(network())
    with pytest.raises(ConfigError, match="unknown codec"):
        compress_fsdp(sharded(), codec="squinch9")
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("squinchcomm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model = sharded(compress={})
        run(model), run(model)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.WARNING)
    assert len(lines) == 3 and all("reduce_scatter" in line and get_codec("squinch6").name in line for line in lines), lines


def check_convergence() -> None:
    """200 steps: all ranks hold the same parameters, and the loss is that of exact gradients."""
    teacher = torch.randn(WIDTH, 5, generator=torch.Generator().manual_seed(7)) / WIDTH**0.5
    losses = {}
    for name, compress in (("exact", None), ("squinch6", {})):
        model = sharded(compress=compress)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for step in range(200):
            inputs = batch(rank(), 1 + step)
            loss = (model(inputs) - inputs @ teacher).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        whole = [parameter.full_tensor() for parameter in model.parameters()]
        assert_same_on_all_ranks(whole)
        test = torch.randn(500, WIDTH, generator=torch.Generator().manual_seed(5))
        plain = network()
        for parameter, value in zip(plain.parameters(), whole, strict=True):
            parameter.data.copy_(value)
        losses[name] = (plain(test) - test @ teacher).square().mean().item()
    assert losses["exact"] < 0.5
    assert abs(losses["squinch6"] / losses["exact"] - 1) < 0.05, losses


def check_overflow_on_one_rank_with_ddp() -> None:
    """Every rank skips the step and halves the scale; residuals of error feedback stay as they were."""
    for settings in ({}, {"error_feedback": True}):
        model = network()
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
        state = CompressState(min_compress_bytes=0, **settings)
        ddp.register_comm_hook(state, compress_hook)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step in range(6):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            residuals = state.state_dict()["residuals"]
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = ddp(batch(rank(), step)).float()
            if step == 3 and rank() == size() - 1:
                output = output * 1e30
            scaler.scale(output.square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            changed = any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
            assert changed == (step != 3)
            assert scaler.get_scale() == (1024.0 if step < 3 else 512.0)
            if step == 3:
                after = state.state_dict()["residuals"]
                assert all(torch.equal(after[name], residuals[name]) for name in residuals)
        assert_same_on_all_ranks(list(model.parameters()))


def check_overflow_on_one_rank_with_fsdp() -> None:
    for reduce in (torch.float32, torch.float16):
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=reduce)
        model = sharded(compress={}, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step in range(5):
            before = [parameter.full_tensor().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            output = model(batch(rank(), step)).float()
            if step == 3 and rank() == size() - 1:
                output = output * 1e30
            scaler.scale(output.square().mean()).backward()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Found a non-scalar tensor")  # torch about its own found_inf
                scaler.step(optimizer)
            scaler.update()
            whole = [parameter.full_tensor() for parameter in model.parameters()]
            changed = any(not torch.equal(old, new) for old, new in zip(before, whole, strict=True))
            assert changed == (step != 3)
            assert scaler.get_scale() == (1024.0 if step < 3 else 512.0)
        assert_same_on_all_ranks(whole)
