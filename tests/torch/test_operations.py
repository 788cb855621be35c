"""Every operation of torch.distributed, in all its forms, against what exact arithmetic says, at several world sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from squinchcomm.errors import MismatchError
from tests.torch.ranks import run_ranks

torch = pytest.importorskip("torch")
dist = torch.distributed

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
EVERY = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)
ONLY_MOVED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32, torch.uint16, torch.uint32, torch.uint64)


def make(rank: int, shape: Sequence[int], dtype: Any, salt: int = 0) -> Any:
    """The tensor that `rank` brings: small numbers, exact in every type, sums of which are exact as well."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    numbers = torch.randint(1, 4, tuple(shape), generator=generator)
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers - 2).double()).to(dtype)
    return (numbers - 2).to(dtype) if dtype.is_signed else (numbers % 2).to(dtype)


def same(actual: Any, expected: Any) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual.reshape(-1).view(torch.uint8), expected.contiguous().reshape(-1).view(torch.uint8))


def oracle(parts: Sequence[Any], op: Any) -> Any:
    """The reduction in float64 (or complex128, int64), rounded once."""
    dtype = parts[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    total = parts[0].to(wide)
    for part in parts[1:]:
        other = part.to(wide)
        total = {
            dist.ReduceOp.SUM: lambda a, b: a + b,
            dist.ReduceOp.AVG: lambda a, b: a + b,
            dist.ReduceOp.MIN: torch.minimum,
            dist.ReduceOp.MAX: torch.maximum,
            dist.ReduceOp.PRODUCT: lambda a, b: a * b,
            dist.ReduceOp.BAND: torch.bitwise_and,
            dist.ReduceOp.BOR: torch.bitwise_or,
            dist.ReduceOp.BXOR: torch.bitwise_xor,
        }[op](total, other)
    if op == dist.ReduceOp.AVG:
        total = total / len(parts)
    return total.to(dtype)


def ops_of(dtype: Any) -> list[Any]:
    op = dist.ReduceOp
    if dtype == torch.bool:
        return [op.SUM, op.MIN, op.MAX, op.PRODUCT, op.BAND, op.BOR, op.BXOR]
    if dtype in INTEGERS:
        return [op.SUM, op.MIN, op.MAX, op.PRODUCT, op.BAND, op.BOR, op.BXOR]
    return [op.SUM, op.AVG] if dtype.is_complex else [op.SUM, op.AVG, op.MIN, op.MAX, op.PRODUCT]


def check_reductions(rank: int, ranks: int) -> None:
    for dtype in EVERY:
        for op in ops_of(dtype):
            parts = [make(each, (3, 50), dtype) for each in range(ranks)]
            expected = oracle(parts, op)
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, op)
            close(tensor, expected)
            strided = make(rank, (50, 3), dtype, salt=1).t()
            expected = oracle([make(each, (50, 3), dtype, salt=1).t() for each in range(ranks)], op)
            work = dist.all_reduce(strided, op, async_op=True)
            work.wait()
            close(strided, expected)
            root = ranks - 1
            tensor = parts[rank].clone()
            dist.reduce(tensor, root, op)
            close(tensor, oracle(parts, op) if rank == root else parts[rank])


def close(actual: Any, expected: Any) -> None:
    """Exact, but for the last bit of averages."""
    torch.testing.assert_close(actual, expected, rtol=1e-6 if actual.dtype != torch.bfloat16 else 1e-2, atol=1e-6)


def check_premultiplied(rank: int, ranks: int) -> None:
    """Each rank's contribution times a factor of its own."""
    factor = float(rank + 1)
    expected = sum((each + 1) * make(each, (40,), torch.float32) for each in range(ranks))
    op = dist._make_nccl_premul_sum(factor)
    tensor = make(rank, (40,), torch.float32)
    dist.all_reduce(tensor, op)
    torch.testing.assert_close(tensor, expected)
    tensor = make(rank, (40,), torch.float32)
    dist.reduce(tensor, 0, op)
    torch.testing.assert_close(tensor, expected if rank == 0 else make(rank, (40,), torch.float32))
    source = torch.cat([make(rank, (40,), torch.float32)] * ranks)
    output = torch.empty(40)
    dist.reduce_scatter_tensor(output, source, op)
    torch.testing.assert_close(output, expected)


def check_reduce_scatter(rank: int, ranks: int) -> None:
    for dtype, op in itertools.product((torch.float32, torch.bfloat16, torch.int64), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)):
        whole = [make(each, (ranks * 4, 5), dtype, salt=2) for each in range(ranks)]
        expected = oracle(whole, op)
        output = torch.empty(4, 5, dtype=dtype)
        dist.reduce_scatter_tensor(output, whole[rank].clone(), op)
        same(output, expected[4 * rank : 4 * rank + 4])
        sizes = [2 * each + 1 for each in range(ranks)]
        whole = [make(each, (sum(sizes),), dtype, salt=3) for each in range(ranks)]
        output = torch.empty(sizes[rank], dtype=dtype)
        dist.reduce_scatter(output, list(whole[rank].split(sizes)), op)
        same(output, oracle(whole, op).split(sizes)[rank])
    outputs = [torch.empty(3), torch.empty(2, 2)]
    inputs = [make(rank, (3 * ranks,), torch.float32), make(rank, (2 * ranks, 2), torch.float32, salt=4)]
    with dist._coalescing_manager():
        for output, source in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, source)
    for output, (shape, salt) in zip(outputs, (((3 * ranks,), 0), ((2 * ranks, 2), 4)), strict=True):
        total = oracle([make(each, shape, torch.float32, salt) for each in range(ranks)], dist.ReduceOp.SUM)
        same(output, total.chunk(ranks)[rank])


def check_gathers(rank: int, ranks: int) -> None:
    for dtype in (*EVERY, *ONLY_MOVED):
        parts = [plain(each, (2, 7), dtype) for each in range(ranks)]
        outputs = [torch.empty(2, 7, dtype=dtype) for _ in range(ranks)]
        dist.all_gather(outputs, parts[rank])
        for output, part in zip(outputs, parts, strict=True):
            same(output, part)
        flat = torch.empty(2 * ranks, 7, dtype=dtype)
        dist.all_gather_into_tensor(flat, parts[rank])
        same(flat, torch.cat([part.view(-1).view(torch.uint8) for part in parts]).view(dtype).view(2 * ranks, 7))
        root = ranks // 2
        outputs = [torch.empty(2, 7, dtype=dtype) for _ in range(ranks)] if rank == root else None
        dist.gather(parts[rank], outputs, root)
        for output, part in zip(outputs or [], parts, strict=rank == root):
            same(output, part)
        output = torch.empty(2, 7, dtype=dtype)
        dist.scatter(output, parts if rank == root else None, root)
        same(output, parts[rank])
        tensor = plain(rank, (5, 3), dtype).t()
        dist.broadcast(tensor, root)
        assert tensor.stride() == (1, 3)
        same(tensor.contiguous(), plain(root, (5, 3), dtype).t().contiguous())


def plain(rank: int, shape: Sequence[int], dtype: Any) -> Any:
    """As `make`, for types that torch cannot convert to as well."""
    if dtype in ONLY_MOVED:
        size = torch.empty(0, dtype=dtype).element_size()
        count = int(torch.tensor(shape).prod()) * size
        numbers = torch.randint(0, 60, (count,), generator=torch.Generator().manual_seed(rank)).to(torch.uint8)
        return numbers.view(dtype).view(*shape)
    return make(rank, shape, dtype)


def check_uneven_and_coalesced_gathers(rank: int, ranks: int) -> None:
    outputs = [torch.empty(each + 1, 2) for each in range(ranks)]
    dist.all_gather(outputs, make(rank, (rank + 1, 2), torch.float32))
    for each, output in enumerate(outputs):
        same(output, make(each, (each + 1, 2), torch.float32))
    kinds = ((3,), torch.float32, 5), ((2, 2), torch.float32, 6), ((4,), torch.int64, 7)
    lists = [[torch.empty(shape, dtype=dtype) for shape, dtype, _ in kinds] for _ in range(ranks)]
    dist.group.WORLD.allgather_coalesced(lists, [make(rank, *kind) for kind in kinds]).wait()
    for each in range(ranks):
        for output, kind in zip(lists[each], kinds, strict=True):
            same(output, make(each, *kind))
    flats = [torch.empty(3 * ranks), torch.empty(4 * ranks)]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(flats[0], make(rank, (3,), torch.float32, 5))
        dist.all_gather_into_tensor(flats[1], make(rank, (4,), torch.float32, 8))
    manager.wait()
    same(flats[0], torch.cat([make(each, (3,), torch.float32, 5) for each in range(ranks)]))
    same(flats[1], torch.cat([make(each, (4,), torch.float32, 8) for each in range(ranks)]))
    tensors = [make(rank, shape, torch.float32, salt=9) for shape in ((3,), (2, 5), ())]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor in tensors:
        same(tensor, oracle([make(each, tensor.shape, torch.float32, salt=9) for each in range(ranks)], dist.ReduceOp.SUM))


def check_all_to_all(rank: int, ranks: int) -> None:
    for dtype in (torch.float32, torch.complex64, torch.bfloat16, torch.bool):
        inputs = [make(rank * 16 + peer, (3, 2), dtype) for peer in range(ranks)]
        expected = [make(peer * 16 + rank, (3, 2), dtype) for peer in range(ranks)]
        output = torch.empty(3 * ranks, 2, dtype=dtype)
        dist.all_to_all_single(output, torch.cat(inputs))
        same(output, torch.cat(expected))
        outputs = [torch.empty(3, 2, dtype=dtype) for _ in range(ranks)]
        dist.all_to_all(outputs, inputs)
        for output, part in zip(outputs, expected, strict=True):
            same(output, part)
    rows = [[(source * 3 + target) % 4 for target in range(ranks)] for source in range(ranks)]
    inputs = [make(rank * 16 + peer, (rows[rank][peer], 3), torch.float32) for peer in range(ranks)]
    expected = [make(peer * 16 + rank, (rows[peer][rank], 3), torch.float32) for peer in range(ranks)]
    output = torch.empty(sum(part.shape[0] for part in expected), 3)
    takes = [part.shape[0] for part in expected]
    dist.all_to_all_single(output, torch.cat(inputs), takes, rows[rank])
    same(output, torch.cat(expected))


def check_messages(rank: int, ranks: int) -> None:
    if ranks == 1:
        return
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    for dtype, count in itertools.product((torch.float32, torch.bool, torch.float8_e4m3fn), (0, 3, 20_000)):
        sends = [dist.isend(plain(rank * 7 + tag, (count,), dtype), right, tag=tag) for tag in (1, 2)]
        for tag in (2, 1):
            tensor = torch.empty(count, dtype=dtype)
            assert dist.recv(tensor, left, tag=tag) == left
            same(tensor, plain(left * 7 + tag, (count,), dtype))
        for work in sends:
            work.wait()
    if rank:
        dist.send(torch.tensor([float(rank)]), 0, tag=9)
    else:
        box = torch.empty(1)
        sources = []
        for _ in range(ranks - 1):
            source = dist.recv(box, tag=9)
            assert box.item() == source
            sources.append(source)
        assert sorted(sources) == list(range(1, ranks))
    own, theirs = torch.full((4,), float(rank)), torch.empty(4)
    requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, own, right), dist.P2POp(dist.irecv, theirs, left)])
    for request in requests:
        request.wait()
    assert theirs[0].item() == left


def check_objects(rank: int, ranks: int) -> None:
    everything: list[Any] = [None] * ranks
    dist.all_gather_object(everything, {"rank": rank, "name": "x" * rank})
    assert everything == [{"rank": each, "name": "x" * each} for each in range(ranks)]
    box = [f"from {rank}", rank]
    dist.broadcast_object_list(box, src=ranks - 1)
    assert box == [f"from {ranks - 1}", ranks - 1]
    gathered: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object((rank,), gathered)
    assert gathered is None or gathered == [(each,) for each in range(ranks)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {each}" for each in range(ranks)] if rank == 0 else None)
    assert mine == [f"for {rank}"]


def check_sparse(rank: int, ranks: int) -> None:
    def part(each: int) -> Any:
        indices = torch.tensor([[0, each, each], [1, 0, 0]])
        return torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0 + each]), (ranks, 2))

    for asynchronous in (False, True):
        tensor = part(rank)
        work = dist.all_reduce(tensor, async_op=asynchronous)
        if work is not None:
            work.wait()
        assert torch.equal(tensor.to_dense(), sum(part(each).to_dense() for each in range(ranks)))
    empty = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 3), (4, 3))
    dist.all_reduce(empty)
    assert empty.to_dense().sum() == 0
    longer = torch.sparse_coo_tensor([[1]], [1.0], (10 + (rank == 1),))
    if ranks > 1:
        with pytest.raises(MismatchError, match=r"rank 0's has shape \[10\].*rank 1's \[11\]"):
            dist.all_reduce(longer)


def check_edges(rank: int, ranks: int) -> None:
    """Empty tensors, scalars, leaves that need gradients, arguments that are wrong."""
    for shape in ((0,), (), (0, 3)):
        tensor = torch.ones(shape)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full(shape, float(ranks)))
        dist.broadcast(tensor, 0)
    leaf = torch.ones(5, requires_grad=True)
    dist.all_reduce(leaf)
    assert leaf.requires_grad and leaf.grad_fn is None and leaf.detach().sum() == 5 * ranks
    leaf.untyped_storage().resize_(0)  # as FSDP does with what it has gathered
    dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)])
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="'avg' is not defined for int64"):
        dist.all_reduce(torch.ones(3, dtype=torch.int64), dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="'band' is not defined for float32"):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match="PREMUL_SUM needs a factor"):
        group.allreduce(torch.ones(3), dist.ReduceOp.PREMUL_SUM)
    with pytest.raises(ValueError, match="2 tensors"):
        group.allreduce([torch.ones(1), torch.ones(1)])
    with pytest.raises(ValueError, match=f"{ranks + 1} output tensors"):
        dist.all_gather([torch.ones(1)] * (ranks + 1), torch.ones(1))
    with pytest.raises(TypeError, match="not one on meta"):
        dist.all_reduce(torch.ones(3, device="meta"))
    with pytest.raises(TypeError, match="float8"):
        dist.all_reduce(torch.zeros(3).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"split sizes|counts|Split sizes"):
        group.alltoall_base(torch.empty(3), torch.empty(3), [1] * ranks + [7], []).wait()
    dist.barrier()


def check_bare_forms(rank: int, ranks: int) -> None:
    """The forms of ProcessGroup without options objects."""
    group = dist.group.WORLD
    tensor = torch.ones(3)
    group.allreduce(tensor, dist.ReduceOp.SUM).wait()
    group.allreduce([tensor], dist.ReduceOp.MAX).wait()
    assert tensor[0] == ranks
    group.broadcast(tensor, 0).wait()
    group.reduce(tensor, 0, dist.ReduceOp.SUM).wait()
    outputs = [torch.empty(2) for _ in range(ranks)]
    group.allgather(outputs, torch.full((2,), float(rank))).wait()
    assert [output[0].item() for output in outputs] == list(range(ranks))
    group.gather(outputs if rank == 0 else [], torch.full((2,), float(rank)), 0).wait()
    output = torch.empty(2)
    group.scatter(output, outputs if rank == 0 else [], 0).wait()
    group.reduce_scatter(output, [torch.ones(2)] * ranks, dist.ReduceOp.SUM).wait()
    assert output[0] == ranks
    group.alltoall([torch.empty(1) for _ in range(ranks)], [torch.ones(1)] * ranks).wait()
    group._allgather_base(torch.empty(2 * ranks), torch.ones(2)).wait()
    group._reduce_scatter_base(torch.empty(2), torch.ones(2 * ranks)).wait()
    group.barrier().wait()
    assert group.name() == dist.get_backend(group) == "squinch"


CHECKS = (
    check_reductions,
    check_premultiplied,
    check_reduce_scatter,
    check_gathers,
    check_uneven_and_coalesced_gathers,
    check_all_to_all,
    check_messages,
    check_objects,
    check_sparse,
    check_edges,
    check_bare_forms,
)


def every_check(rank: int) -> None:
    for check in CHECKS:
        try:
            check(rank, dist.get_world_size())
        except BaseException as error:
            error.add_note(f"in {check.__name__}")
            raise


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_operation(world_size: int) -> None:
    run_ranks(world_size, every_check, compress="off")
