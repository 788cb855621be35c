"""Calls that are wrong, on one rank or between ranks: each gets its documented error on every rank, and nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from squinchcomm.collectives import wire
from squinchcomm.collectives.channel import codec_name
from squinchcomm.communicator import Communicator
from squinchcomm.errors import ConfigError, MismatchError
from tests.worlds import ones, outcomes, run_world

Call = Callable[[Communicator], Any]

MISMATCHES: dict[str, tuple[Call, Call, str]] = {
    "op": (lambda c: c.allreduce(ones(10)), lambda c: c.all_gather(ones(30), ones(10)), "all_gather"),
    "reduction": (lambda c: c.allreduce(ones(10)), lambda c: c.allreduce(ones(10), "max"), "max"),
    "count": (lambda c: c.allreduce(ones(90_000)), lambda c: c.allreduce(ones(90_001)), "90001 elements"),
    "shape": (lambda c: c.allreduce(ones(12).reshape(3, 4)), lambda c: c.allreduce(ones(12).reshape(4, 3)), "shape"),
    "dtype": (lambda c: c.allreduce(ones(10)), lambda c: c.allreduce(ones(10, np.int32)), "int32"),
    "codec": (lambda c: c.allreduce(ones(90_000)), lambda c: c.allreduce(ones(90_000), codec="squinch6"), "squinch6"),
    "root": (lambda c: c.broadcast(ones(10), 0), lambda c: c.broadcast(ones(10), 1), "root 1"),
    "parts": (
        lambda c: c.reduce_scatter(ones(4), ones(12)),
        lambda c: c.reduce_scatter(ones(2), ones(12), counts=[5, 2, 5]),
        "parts with checksum",
    ),
    "order": (
        lambda c: [c.allreduce(ones(10)), c.barrier()],
        lambda c: [c.barrier(), c.allreduce(ones(10))],
        "barrier",
    ),
}


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
@pytest.mark.parametrize("kind", list(MISMATCHES))
def test_ranks_that_disagree_all_learn_it(kind: str, transport: str) -> None:
    usual, other, word = MISMATCHES[kind]
    started = time.monotonic()

    def body(comm: Communicator) -> None:
        (other if comm.rank == 1 else usual)(comm)
        comm.barrier()  # a root that only sends learns of it in its next call at the latest

    results = outcomes(3, body, transport=transport, timeout_s=10.0)
    assert time.monotonic() - started < 5.0
    for result in results:
        assert isinstance(result, MismatchError), results
        assert isinstance(result, ValueError)
    told = " ".join(map(str, results))
    assert "rank 1" in told and word in told


BAD_INPUT: dict[str, tuple[Call, type[Exception], str]] = {
    "list": (lambda c: c.allreduce([1.0]), TypeError, "NumPy array or a torch tensor"),
    "object": (lambda c: c.allreduce(np.array([None])), TypeError, "dtype object"),
    "text": (lambda c: c.allreduce(np.array(["a"])), TypeError, "dtype"),
    "byte order": (lambda c: c.allreduce(np.ones(3, ">f4")), TypeError, "dtype"),
    "read-only": (lambda c: c.allreduce(np.broadcast_to(np.float32(1), 5)), ValueError, "read-only"),
    "op": (lambda c: c.allreduce(ones(3), "median"), ValueError, "op must be one of"),
    "avg of ints": (lambda c: c.allreduce(ones(3, np.int64), "avg"), ValueError, "not defined"),
    "max of complex": (lambda c: c.allreduce(ones(3, np.complex64), "max"), ValueError, "not defined"),
    "codec": (lambda c: c.allreduce(ones(3), codec="zip"), ConfigError, "unknown codec 'zip'"),
    "codec of ints": (lambda c: c.allreduce(ones(90_000, np.int32), codec="squinch6"), ConfigError, "cannot serve int32"),
    "codec of max": (lambda c: c.allreduce(ones(90_000), "max", codec="squinch6"), ConfigError, "cannot serve the reduction"),
    "root": (lambda c: c.broadcast(ones(3), 7), ValueError, "root must be a rank from 0 to 1"),
    "timeout": (lambda c: c.allreduce(ones(3), timeout_s=-1), ValueError, "timeout_s"),
    "parts": (lambda c: c.reduce_scatter(ones(1), ones(3)), ValueError, "cannot share equally"),
    "counts": (lambda c: c.all_gather(ones(4), ones(2), counts=[1, 2]), ValueError, "add up"),
    "output": (lambda c: c.reduce_scatter(ones(3), ones(4)), ValueError, "output has 3 elements"),
    "dtypes": (lambda c: c.all_gather(ones(4), ones(2, np.float64)), TypeError, "differ in dtype"),
    "overlap": (lambda c: (lambda a: c.all_to_all(a, a))(ones(4)), ValueError, "overlap"),
    "overlap of all_gather": (lambda c: (lambda a: c.all_gather(a, a[1:3]))(ones(4)), ValueError, "overlap"),
    "overlap of reduce_scatter": (lambda c: (lambda a: c.reduce_scatter(a[1:3], a))(ones(4)), ValueError, "overlap"),
    "gather": (lambda c: c.gather(ones(2), root=c.rank), ValueError, "must be given on the root"),
    "self": (lambda c: c.send(ones(2), c.rank), ValueError, "cannot message itself"),
    "tag": (lambda c: c.send(ones(2), 1 - c.rank, -1), ValueError, "tag"),
    "masked": (lambda c: c.allreduce(np.ma.masked_array(ones(3), [0, 1, 0])), TypeError, "masked array"),
    "repeated": (
        lambda c: c.allreduce(np.lib.stride_tricks.as_strided(ones(3), (4, 3), (0, 4))),
        ValueError,
        "repeats one element",
    ),
    "fractions": (lambda c: c.all_gather(ones(4), ones(2), counts=[2.0, 2.0]), TypeError, "float"),
    "key": (lambda c: c.split(0, 2**70), ValueError, "key"),
    "color type": (lambda c: c.split(True), ValueError, "color"),
    "overlap of scatter": (lambda c: (lambda a: c.scatter(a[1:3], a, root=c.rank))(ones(4)), ValueError, "overlap"),
    "color": (lambda c: c.split(-1), ValueError, "color"),
}


# What rank 1 sends to ranks 0, 1 and 2, and what rank 0 expects from ranks 0, 1 and 2; all else is one element.
PARTS = {
    "nothing came": ([0, 1, 1], [1, 5, 1]),
    "nothing expected": ([5, 1, 1], [1, 0, 1]),
    "more": ([7, 1, 1], [1, 5, 1]),
    "less": ([5, 1, 1], [1, 7, 1]),
    "a chunk more": ([20_000, 1, 1], [1, 8192, 1]),
    "a chunk less": ([8192, 1, 1], [1, 20_000, 1]),
}


@pytest.mark.parametrize("transport", ["inproc", "zmq"])
@pytest.mark.parametrize("kind", list(PARTS))
def test_parts_of_all_to_all_that_do_not_fit(kind: str, transport: str) -> None:
    sends, takes = PARTS[kind]
    started = time.monotonic()

    def body(comm: Communicator) -> None:
        outgoing = sends if comm.rank == 1 else [1, 1, 1]
        incoming = takes if comm.rank == 0 else [1, 1, 1]
        comm.all_to_all(ones(sum(incoming)), ones(sum(outgoing)), output_counts=incoming, input_counts=outgoing)
        comm.barrier()  # who only sends learns of it in its next call at the latest

    results = outcomes(3, body, transport=transport, timeout_s=20.0, chunk_bytes=32 << 10)
    assert time.monotonic() - started < 5.0
    for result in results:
        assert isinstance(result, MismatchError), results
        assert "rank 1 sends" in str(result) and "to rank 0, which expects" in str(result)


@pytest.mark.parametrize("kind", list(BAD_INPUT))
def test_bad_input_is_refused_and_nothing_is_lost(kind: str) -> None:
    call, error, words = BAD_INPUT[kind]

    def body(comm: Communicator) -> None:
        with pytest.raises(error, match=words):
            call(comm)
        array = ones(1000)
        comm.allreduce(array)
        assert np.all(array == 2)

    run_world(2, body)


class AlwaysTwoDimensional(np.ndarray):
    """As np.matrix, which warns."""

    def reshape(self, *shape: Any, **options: Any) -> np.ndarray:
        return np.asarray(self).reshape(1, -1).view(type(self))


def test_subclasses_of_arrays_are_taken_as_plain_memory() -> None:
    def body(comm: Communicator) -> None:
        matrix = ones(60_000).reshape(200, 300).view(AlwaysTwoDimensional)
        comm.allreduce(matrix, codec="squinch6")
        comm.allreduce(matrix)
        np.testing.assert_allclose(np.asarray(matrix), 4, rtol=0.1)

    run_world(2, body, min_compress_bytes=0)


def test_chunks_never_outgrow_a_frame() -> None:
    def body(comm: Communicator) -> None:
        for dtype in (np.uint8, np.float64, np.complex128):
            array = ones(1_500_000, dtype)
            comm.allreduce(array)
            comm.broadcast(array)
            assert np.all(array == 2)

    run_world(2, body, transport="zmq", chunk_bytes=64 << 20)


def test_signatures_of_large_worlds_and_unknown_codecs_can_be_told() -> None:
    parts = wire.Signature("all_gather", "", np.dtype(np.int64), 1000, parts=tuple(range(1000)))
    assert "parts with checksum" in wire.read_header(parts.pack(1, 2)).describe()
    other = wire.Signature("allreduce", "sum", np.dtype(np.int64), 10, (10,), codec_id=200)
    lossless = wire.Signature("allreduce", "sum", np.dtype(np.int64), 10, (10,))
    assert "lossless" in wire.read_header(lossless.pack(1, 2)).describe(codec_name)
    assert "codec number 200" in wire.read_header(other.pack(1, 2)).describe(codec_name)
