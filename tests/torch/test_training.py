"""What people run over a process group: DDP, FSDP2, functional collectives, tensor parallelism."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest

from tests.torch.ranks import run_ranks

torch = pytest.importorskip("torch")
dist = torch.distributed
nn = torch.nn


class Net(nn.Module):
    """Two layers and one that only odd calls use; large enough (300 KB) that its gradients are compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256)
        self.second = nn.Linear(256, 64)
        self.sometimes = nn.Linear(256, 64)

    def forward(self, x: Any, use_all: bool = True) -> Any:
        x = torch.relu(self.first(x))
        return self.second(x) + self.sometimes(x) if use_all else self.second(x)


def net() -> Any:
    torch.manual_seed(7)
    return Net()


def batch(rank: int, step: int = 0) -> Any:
    return torch.randn(8, 256, generator=torch.Generator().manual_seed(100 * step + rank))


def averaged(model: Any, use_all: bool = True, steps: int = 1) -> list[Any]:
    """Gradients of `model`, a plain one, averaged over all ranks' batches, summed over steps."""
    model = copy.deepcopy(model)
    ranks = dist.get_world_size()
    for step in range(steps):
        for rank in range(ranks):
            (model(batch(rank, step), use_all).square().mean() / ranks).backward()
    return [None if each.grad is None else each.grad for each in model.parameters()]


def check_gradients(model: Any, expected: list[Any], tolerance: float) -> None:
    """Close to the exact average, and the same bits on all ranks."""
    for parameter, exact in zip(model.parameters(), expected, strict=True):
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        exact = exact if exact is not None else torch.zeros_like(parameter)
        scale = exact.norm().item() or 1.0
        assert (grad - exact).norm().item() <= tolerance * scale
        everybody = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, grad)
        for other in everybody:
            assert torch.equal(other, grad)


def ddp(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    from squinchcomm.torch import lossless

    stats = dist.group.WORLD.communicator.stats
    model = DistributedDataParallel(net(), bucket_cap_mb=0.2, find_unused_parameters=True)
    for use_all in (True, False, True):  # buckets are rebuilt after the first pass
        expected = averaged(model.module, use_all)
        model.zero_grad()
        before = stats.compressed
        model(batch(rank), use_all).square().mean().backward()
        assert stats.compressed > before
        check_gradients(model, expected, 0.1)
        model.zero_grad()
        before = stats.compressed
        with lossless():  # the hook runs in autograd's threads
            model(batch(rank), use_all).square().mean().backward()
        assert stats.compressed == before
        check_gradients(model, expected, 1e-5)


def accumulation(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    for as_view in (False, True):
        model = DistributedDataParallel(net(), gradient_as_bucket_view=as_view)
        expected = averaged(model.module, steps=3)
        for step in range(3):
            with model.no_sync() if step < 2 else contextlib.nullcontext():
                model(batch(rank, step)).square().mean().backward()
        check_gradients(model, expected, 0.1)


def two_models(rank: int) -> None:
    """As in adversarial training: two wrapped models, steps in turn, one of them on a group of its own."""
    from torch.nn.parallel import DistributedDataParallel

    models = [DistributedDataParallel(net()), DistributedDataParallel(net(), process_group=dist.new_group())]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for step in range(3):
        losses = [model(batch(rank, step)).square().mean() for model in models]
        for loss, optimizer in zip(reversed(losses), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.2, atol=0.02)
        everybody = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, ours.detach())
        assert all(torch.equal(other, ours) for other in everybody)


def mixed_precision(rank: int) -> None:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(net())
    expected = averaged(model.module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch(rank)).square().mean()
    loss.backward()
    check_gradients(model, expected, 0.12)
    half = DistributedDataParallel(net().to(torch.bfloat16))
    half(batch(rank).to(torch.bfloat16)).float().square().mean().backward()
    for parameter, exact in zip(half.parameters(), expected, strict=True):
        assert parameter.grad.dtype == torch.bfloat16
        assert (parameter.grad.float() - exact).norm() <= 0.15 * exact.norm()


def gradient_hooks(rank: int) -> None:
    """PyTorch's own communication hooks work over the backend."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    for hook in (allreduce_hook, fp16_compress_hook):
        model = DistributedDataParallel(net())
        model.register_comm_hook(None, hook)
        expected = averaged(model.module)
        model(batch(rank)).square().mean().backward()
        check_gradients(model, expected, 0.1)


def fsdp(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from squinchcomm.torch import lossless

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    stats = mesh.get_group().communicator.stats
    reference = net()
    expected = averaged(reference)
    for policy, tolerance in ((MixedPrecisionPolicy(), 0.1), (MixedPrecisionPolicy(param_dtype=torch.bfloat16), 0.15)):
        for exact in (False, True):
            model = net()
            for layer in (model.first, model.second, model.sometimes, model):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            before = stats.compressed
            with lossless() if exact else contextlib.nullcontext():
                model(batch(rank).to(policy.param_dtype or torch.float32)).float().square().mean().backward()
            assert (stats.compressed > before) is not exact
            for parameter, due in zip(model.parameters(), expected, strict=True):
                grad = parameter.grad.full_tensor()
                bound = 1e-5 if exact and policy.param_dtype is None else tolerance
                assert (grad.float() - due).norm() <= bound * due.norm()


def functional(rank: int) -> None:
    from torch.distributed import _functional_collectives as functional

    group = dist.group.WORLD
    ranks = dist.get_world_size()
    x = torch.full((4, 3), float(rank))
    total = sum(range(ranks))
    assert torch.equal(functional.all_reduce(x, "sum", group), torch.full((4, 3), float(total)))
    assert torch.equal(functional.all_reduce(x, "avg", group), torch.full((4, 3), total / ranks))
    assert functional.all_gather_tensor(x, 0, group).shape == (4 * ranks, 3)
    scattered = functional.reduce_scatter_tensor(torch.ones(ranks * 2, 3), "sum", 0, group)
    assert torch.equal(scattered, torch.full((2, 3), float(ranks)))
    moved = functional.all_to_all_single(torch.full((ranks, 2), float(rank)), None, None, group)
    assert moved[:, 0].tolist() == list(range(ranks))
    assert functional.broadcast(x, ranks - 1, group)[0, 0] == ranks - 1
    several = functional.all_reduce_coalesced([x, x + 1], "sum", group)
    assert several[1][0, 0] == total + ranks
    gathered = functional.all_gather_into_tensor_coalesced([x, x[:2]], group)
    assert gathered[1].shape == (2 * ranks, 3)
    parts = functional.reduce_scatter_tensor_coalesced([torch.ones(ranks, 2), torch.ones(2 * ranks)], "sum", [0, 0], group)
    assert parts[0][0, 0] == ranks and parts[1].shape == (2,)


def tensor_parallel(rank: int) -> None:
    """Large activations are summed in the forward pass: `lossless` keeps them exact, and DTensor works."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from squinchcomm.torch import lossless

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 64))
    x = torch.randn(600, 64)
    exact = layers(x)
    parallel = parallelize_module(copy.deepcopy(layers), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    stats = mesh.get_group().communicator.stats
    before = stats.compressed
    with lossless():
        out = parallel(x)
        out = out.full_tensor() if isinstance(out, DTensor) else out
        torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)
        out.sum().backward()
    assert stats.compressed == before
    assert parallel(x)[0, 0] != 0 and stats.compressed > before, "without the guard these sums count as gradients"
    table = torch.arange(30.0).view(10, 3)
    sharded = distribute_tensor(table, mesh, [Shard(0)])
    assert torch.equal(sharded.full_tensor(), table)
    assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), table)
    assert torch.equal(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), table)


def compiled(rank: int) -> None:
    """torch.compile over DDP, functional collectives in a graph, the first FSDP."""
    from torch.distributed._functional_collectives import all_reduce
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = torch.compile(nn.parallel.DistributedDataParallel(net()), backend="aot_eager")
    plain = nn.parallel.DistributedDataParallel(net())
    for step in range(2):
        module(batch(rank, step)).sum().backward()
        plain(batch(rank, step)).sum().backward()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def graph(tensor: Any) -> Any:
        return all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1

    assert torch.equal(graph(torch.ones(5)), torch.full((5,), 2.0 * dist.get_world_size() + 1))
    first = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    for step in range(2):
        first(batch(rank, step)).sum().backward()


@pytest.mark.slow
def test_compiled_models() -> None:
    run_ranks(2, compiled, timeout_s=110, compress="off")


CHECKS = (ddp, accumulation, two_models, mixed_precision, gradient_hooks, fsdp, functional, tensor_parallel)


def every_check(rank: int) -> None:
    for check in CHECKS:
        try:
            check(rank)
        except BaseException as error:
            error.add_note(f"in {check.__name__}")
            raise


@pytest.mark.parametrize("world_size", [2, 3])
def test_training(world_size: int) -> None:
    run_ranks(world_size, every_check, timeout_s=110)
