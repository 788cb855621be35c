"""What every collective must do, over whatever transport: one function a behaviour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from squinchcomm.communicator import Communicator
from squinchcomm.kernels.dtypes import BFLOAT16, dtype_name, from_float32, to_float32

World = Callable[..., list[Any]]

COUNTS = (0, 1, 2, 3, 7, 511, 512, 513, 4099, 100_003)
DTYPES = tuple(
    np.dtype(name)
    for name in "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 complex128".split()
) + (BFLOAT16,)
ORACLES = {"sum": np.sum, "avg": np.mean, "min": np.min, "max": np.max, "product": np.prod}


def random_array(seed: int, count: int, dtype: Any = np.float32) -> np.ndarray:
    """Random elements of any supported dtype, different for each seed."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype == BFLOAT16:
        return from_float32(rng.standard_normal(count).astype(np.float32), BFLOAT16)
    if dtype.kind == "b":
        return rng.random(count) < 0.5
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, count, dtype, endpoint=True)
    if dtype.kind == "c":
        return (rng.standard_normal(count) + 1j * rng.standard_normal(count)).astype(dtype)
    return rng.standard_normal(count).astype(dtype)


def wide(array: np.ndarray) -> np.ndarray:
    """The same numbers in a type that arithmetic does not round."""
    if array.dtype == BFLOAT16:
        return to_float32(array).astype(np.float64)
    return array.astype({"c": np.complex128, "f": np.float64}.get(array.dtype.kind, array.dtype))


def same_bits(arrays: list[np.ndarray]) -> None:
    """All arrays hold the same bytes."""
    for array in arrays[1:]:
        assert array.tobytes() == arrays[0].tobytes()


def tolerance(dtype: np.dtype) -> float:
    """Relative rounding error that sums of a few elements may show."""
    return {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-6, "complex64": 2e-6}.get(dtype_name(dtype), 1e-14)


def check_allreduce(world: World, size: int, dtype: Any, op: str, counts: tuple[int, ...] = COUNTS) -> None:
    """Lossless allreduce equals the oracle, in place, with the same bits on all ranks."""
    dtype = np.dtype(dtype)

    def body(comm: Communicator) -> list[np.ndarray]:
        arrays = [random_array(comm.rank * 100 + index, count, dtype) for index, count in enumerate(counts)]
        for array in arrays:
            assert comm.allreduce(array, op) is None
        return arrays

    results = world(size, body)
    for index, count in enumerate(counts):
        got = [ranks[index] for ranks in results]
        same_bits(got)
        stack = np.stack([wide(random_array(rank * 100 + index, count, dtype)) for rank in range(size)])
        if dtype.kind in "biu":
            reduce = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}[op].reduce
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(
                    got[0], reduce(stack, axis=0, **({"dtype": dtype} if op in ("sum", "product") else {}))
                )
        else:
            expected = ORACLES[op](stack, axis=0)
            scale = np.abs(stack).sum(axis=0) if op in ("sum", "avg") else np.abs(expected)
            assert np.all(np.abs(wide(got[0]) - expected) <= tolerance(dtype) * (scale + 1e-4)), (count, dtype, op)


def check_compressed_allreduce(world: World, size: int, codec: str, dtype: Any, op: str, counts: tuple[int, ...]) -> None:
    """Compressed allreduce stays within two quantisations of the oracle; same bits on all ranks and in a second run."""

    def body(comm: Communicator) -> list[np.ndarray]:
        arrays = [random_array(comm.rank * 100 + index, count, dtype) for index, count in enumerate(counts)]
        for array in arrays:
            comm.allreduce(array, op, codec=codec)
        assert comm.stats.compressed == len(counts)
        return arrays

    first = world(size, body, min_compress_bytes=0)
    again = world(size, body, min_compress_bytes=0)
    for index, count in enumerate(counts):
        got = [ranks[index] for ranks in first]
        same_bits([*got, again[0][index]])
        if not count:
            continue
        stack = np.stack([wide(random_array(rank * 100 + index, count, dtype)) for rank in range(size)])
        expected = ORACLES[op](stack, axis=0)
        if size > 1:
            error = wide(got[0]) - expected
            if count > 400:
                snr = 10 * np.log10((expected**2).sum() / (error**2).sum())
                assert snr >= {"squinch6": 22.5, "squinch6-sr": 19.5, "bf16": 45.0, "int8": 36.0}[codec], (codec, count, snr)
        else:
            assert np.array_equal(wide(got[0]), expected)


def check_nonfinite(world: World, size: int, codec: str) -> None:
    """A NaN or infinity on one rank is non-finite on every rank, compressed or not; other blocks are not touched."""
    count = 70_001
    where = {"nan": (5, np.nan), "inf": (33_333, np.inf), "-inf": (count - 1, -np.inf)}

    def body(comm: Communicator) -> np.ndarray:
        array = random_array(comm.rank, count)
        for position, value in where.values():
            if comm.rank == comm.world_size - 1:
                array[position] = value
        comm.allreduce(array, "avg", codec=codec)
        return array

    results = world(size, body, min_compress_bytes=0)
    same_bits(results)
    assert np.isnan(results[0][5])
    assert not np.isfinite(results[0][33_333])
    assert not np.isfinite(results[0][count - 1])
    assert np.isfinite(results[0][20_000:20_100]).all()


def check_extremes(world: World, size: int) -> None:
    """Denormals, zeros of both signs and huge values survive a lossless sum."""
    base = np.array([0.0, -0.0, 1e-45, -1e-45, 1.17e-38, 3.4e38, -3.4e38, 1.0], np.float32)

    def body(comm: Communicator) -> np.ndarray:
        array = base.copy() if comm.rank == 0 else np.zeros_like(base)
        comm.allreduce(array)
        return array

    for result in world(size, body):
        np.testing.assert_array_equal(result, base)


def check_reduce(world: World, size: int) -> None:
    """The root gets the sum; the others keep what they had, even read-only arrays."""

    def body(comm: Communicator) -> list[np.ndarray]:
        out = []
        for root in {0, comm.world_size - 1}:
            for count in (1, 5, 100_003):
                array = random_array(comm.rank, count)
                if comm.rank != root:
                    array.setflags(write=False)
                comm.reduce(array, root)
                expected = np.sum([random_array(rank, count) for rank in range(comm.world_size)], axis=0)
                if comm.rank == root:
                    np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5)
                else:
                    np.testing.assert_array_equal(array, random_array(comm.rank, count))
                out.append(array)
        return out

    world(size, body)


def check_reduce_scatter(world: World, size: int, codec: str | None) -> None:
    """Each rank gets its part of the sum, equal parts and uneven ones; the input stays."""

    def body(comm: Communicator) -> None:
        ranks = comm.world_size
        for counts in (None, [1000 * rank + 7 for rank in range(ranks)], [0] * (ranks - 1) + [70_001]):
            parts = counts or [30_011] * ranks
            total = sum(parts)
            source = random_array(comm.rank, total)
            output = np.empty(parts[comm.rank], np.float32)
            comm.reduce_scatter(output, source, "avg", counts=counts, codec=codec)
            np.testing.assert_array_equal(source, random_array(comm.rank, total))
            stack = np.stack([random_array(rank, total) for rank in range(ranks)])
            start = sum(parts[: comm.rank])
            expected = stack[:, start : start + output.size].mean(axis=0)
            bound = 1e-5 if codec is None or ranks == 1 else 0.08 * np.abs(stack).max()
            assert np.all(np.abs(output - expected) <= bound)

    world(size, body, min_compress_bytes=0)


def check_all_gather(world: World, size: int, dtype: Any) -> None:
    """Everybody gets all parts, equal or uneven, also when the input is its own place in the output."""

    def body(comm: Communicator) -> None:
        ranks = comm.world_size
        for counts in (None, [3 * rank for rank in range(ranks)], [0] * (ranks - 1) + [200_003]):
            parts = counts or [50_021] * ranks
            expected = np.concatenate([random_array(rank, parts[rank], dtype) for rank in range(ranks)])
            output = np.zeros(sum(parts), dtype)
            comm.all_gather(output, random_array(comm.rank, parts[comm.rank], dtype), counts=counts)
            assert output.tobytes() == expected.tobytes()
            output = np.zeros(sum(parts), dtype)
            start = sum(parts[: comm.rank])
            own = output[start : start + parts[comm.rank]]
            own[:] = random_array(comm.rank, parts[comm.rank], dtype)
            comm.all_gather(output, own, counts=counts)
            assert output.tobytes() == expected.tobytes()

    world(size, body)


def check_compressed_all_gather(world: World, size: int) -> None:
    """On request, parameters are encoded once: everybody, the owner included, has the decoded bytes."""

    def body(comm: Communicator) -> np.ndarray:
        output = np.zeros(30_000 * comm.world_size, np.float32)
        comm.all_gather(output, random_array(comm.rank, 30_000), codec="squinch6")
        expected = np.concatenate([random_array(rank, 30_000) for rank in range(comm.world_size)])
        if comm.world_size > 1:
            snr = 10 * np.log10((expected**2).sum() / ((output - expected) ** 2).sum())
            assert snr > 26.0
        return output

    same_bits(world(size, body))


def check_broadcast(world: World, size: int, dtype: Any) -> None:
    """All ranks get the root's array, small and large."""

    def body(comm: Communicator) -> None:
        for root in range(comm.world_size):
            for count in (0, 1, 17, 5000, 300_007):
                array = random_array(comm.rank + 10 * root, count, dtype)
                comm.broadcast(array, root)
                assert array.tobytes() == random_array(root + 10 * root, count, dtype).tobytes()

    world(size, body)


def check_gather_scatter(world: World, size: int) -> None:
    """Gather collects rows on the root, scatter deals them out."""

    def body(comm: Communicator) -> None:
        for root in {0, comm.world_size - 1}:
            for count in (0, 1, 400_009):
                table = np.zeros((comm.world_size, count), np.float32) if comm.rank == root else None
                comm.gather(random_array(comm.rank, count), table, root)
                if table is not None:
                    np.testing.assert_array_equal(table, [random_array(rank, count) for rank in range(comm.world_size)])
                row = np.zeros(count, np.float32)
                comm.scatter(row, table, root)
                np.testing.assert_array_equal(row, random_array(comm.rank, count))

    world(size, body)


def check_all_to_all(world: World, size: int) -> None:
    """Part p of rank r's input is part r of rank p's output, equal and uneven."""

    def part(source: int, target: int, count: int) -> np.ndarray:
        return random_array(source * 16 + target, count)

    def body(comm: Communicator) -> None:
        ranks, me = range(comm.world_size), comm.rank
        for size_of in (lambda source, target: 401, lambda source, target: (source * 7 + target * 3) % 5 * 90_001):
            sends = [size_of(me, peer) for peer in ranks]
            takes = [size_of(peer, me) for peer in ranks]
            output = np.zeros(sum(takes), np.float32)
            source = np.concatenate([part(me, peer, sends[peer]) for peer in ranks])
            comm.all_to_all(output, source, output_counts=takes, input_counts=sends)
            np.testing.assert_array_equal(output, np.concatenate([part(peer, me, takes[peer]) for peer in ranks]))

    world(size, body)


def check_barrier(world: World, size: int) -> None:
    """Nobody leaves before everybody has come."""
    arrived: list[int] = []

    def body(comm: Communicator) -> None:
        for round_number in range(1, 6):
            arrived.append(comm.rank)
            comm.barrier()
            assert len(arrived) >= round_number * comm.world_size
            comm.barrier()

    world(size, body)


def check_views(world: World, size: int) -> None:
    """Non-contiguous views, Fortran order, 0-d and n-d arrays are reduced in place."""

    def body(comm: Communicator) -> None:
        base = random_array(comm.rank, 9_000).reshape(30, 300)
        expected = np.sum([random_array(rank, 9_000).reshape(30, 300) for rank in range(comm.world_size)], axis=0)
        for view in (lambda a: a[::2, 5:-3:7], lambda a: a.T, np.asfortranarray, lambda a: a[3:4, 2], lambda a: a):
            array = base.copy()
            target = view(array)
            comm.allreduce(target)
            np.testing.assert_allclose(target, view(expected), rtol=1e-5, atol=1e-6)
        scalar = np.array(float(comm.rank + 1))
        comm.allreduce(scalar)
        assert scalar == comm.world_size * (comm.world_size + 1) / 2

    world(size, body)


def check_async(world: World, size: int) -> None:
    """Hundreds of calls in flight finish in order and right; sync calls may come between."""

    def body(comm: Communicator) -> None:
        arrays = [random_array(comm.rank * 1000 + index, 100 + index * 37) for index in range(200)]
        works = [comm.allreduce(array, async_op=True) for array in arrays]
        between = np.ones(3, np.float32)
        comm.allreduce(between)
        assert np.all(between == comm.world_size)
        for index, work in enumerate(works):
            work.wait(30.0)
            assert work.is_completed() and work.exception() is None
            expected = np.sum(
                [random_array(rank * 1000 + index, arrays[index].size) for rank in range(comm.world_size)], axis=0
            )
            np.testing.assert_allclose(arrays[index], expected, rtol=1e-4, atol=1e-5)

    world(size, body)


def check_messages(world: World, size: int) -> None:
    """Sends meet receives by source and tag, whatever the order and the collectives in between."""

    def body(comm: Communicator) -> None:
        me, ranks = comm.rank, comm.world_size
        if ranks == 1:
            return
        right, left = (me + 1) % ranks, (me - 1) % ranks
        for count in (0, 1, 900, 1_500_007):
            works = [comm.send(random_array(me * 7 + tag, count), right, tag, async_op=True) for tag in (1, 2, 3)]
            total = np.ones(2, np.float32)
            comm.allreduce(total)
            for tag in (3, 1, 2):
                array = np.zeros(count, np.float32)
                assert comm.recv(array, left, tag) == left
                np.testing.assert_array_equal(array, random_array(left * 7 + tag, count))
            for work in works:
                work.wait(20.0)
        if me:
            comm.send(np.array([me]), 0, 9)
        else:
            box = np.zeros(1, np.int64)
            sources = [comm.recv(box, None, 9) for _ in range(ranks - 1)]
            assert sorted(sources) == list(range(1, ranks))
        comm.barrier()

    world(size, body)


def check_split(world: World, size: int) -> None:
    """Groups by color, ordered by key; parent and children work side by side, in different orders on different ranks."""

    def body(comm: Communicator) -> None:
        color = comm.rank % 2
        child = comm.split(color, key=-comm.rank)
        members = [rank for rank in range(comm.world_size) if rank % 2 == color][::-1]
        assert child.world_size == len(members) and members[child.rank] == comm.rank
        array = np.array([float(comm.rank)])
        pending = None
        if comm.rank % 3 == 0:
            pending = comm.allreduce(array, async_op=True)
        inner = np.array([float(comm.rank)])
        child.allreduce(inner)
        assert inner[0] == sum(members)
        if pending is None:
            comm.allreduce(array)
        else:
            pending.wait(20.0)
        assert array[0] == sum(range(comm.world_size))
        none = comm.split(0 if comm.rank == 0 else None)
        assert (none is None) == (comm.rank != 0)
        for each in (child, none):
            if each is not None:
                each.close()

    world(size, body)
