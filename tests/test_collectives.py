"""All collectives over the in-process transport at every world size, and over ZeroMQ."""

from __future__ import annotations

import functools
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from squinchcomm.collectives import call
from squinchcomm.collectives.coder import CodecCoder
from squinchcomm.communicator import Communicator
from squinchcomm.config import Config
from squinchcomm.errors import CommunicatorAborted
from squinchcomm.joining import join
from squinchcomm.kernels.dtypes import dtype_name
from squinchcomm.transport.inproc import InprocRendezvous
from squinchcomm.transport.options import TransportOptions
from squinchcomm.transport.registry import get_backend
from tests.conformance import collective_checks as checks
from tests.worlds import WORLD_SIZES, run_world

# The narrowest window shows what waits for what.
WORLDS = [("inproc", size, 32) for size in WORLD_SIZES] + [("inproc", 4, 2), ("zmq-ipc", 5, 2), ("zmq-tcp", 4, 32)]
FLOATS = [dtype for dtype in checks.DTYPES if dtype.kind in "fV"]
OTHERS = [dtype for dtype in checks.DTYPES if dtype.kind not in "fV"]


@pytest.fixture(params=WORLDS, ids=lambda world: "{}-{}-window{}".format(*world))
def world(request: Any) -> tuple[Any, int]:
    name, size, window = request.param
    transport, _, scheme = name.partition("-")
    options = TransportOptions(scheme=scheme or "auto", window=window)
    return functools.partial(run_world, transport=transport, options=options), size


@pytest.mark.parametrize("op", list(checks.ORACLES))
def test_allreduce_of_floats(world: Any, op: str) -> None:
    for dtype in FLOATS:
        checks.check_allreduce(*world, dtype, op)


@pytest.mark.parametrize("op", ["sum", "product", "max"])
def test_allreduce_of_other_types(world: Any, op: str) -> None:
    for dtype in OTHERS:
        if not (dtype.kind == "c" and op == "max"):
            checks.check_allreduce(*world, dtype, op, (1, 513, 20_011))


@pytest.mark.parametrize("codec", ["squinch6", "squinch6-sr", "bf16", "int8"])
def test_compressed_allreduce(world: Any, codec: str) -> None:
    checks.check_compressed_allreduce(*world, codec, np.float32, "sum", checks.COUNTS)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, checks.BFLOAT16], ids=lambda dtype: dtype_name(np.dtype(dtype)))
def test_compressed_allreduce_of_other_floats(world: Any, dtype: Any) -> None:
    checks.check_compressed_allreduce(*world, "squinch6", dtype, "avg", (1, 513, 100_003))


@pytest.mark.parametrize("codec", ["none", "squinch6", "squinch6-sr", "bf16", "int8"])
def test_nonfinite_values_stay_nonfinite(world: Any, codec: str) -> None:
    checks.check_nonfinite(*world, codec)


def test_extremes(world: Any) -> None:
    checks.check_extremes(*world)


def test_reduce(world: Any) -> None:
    checks.check_reduce(*world)


@pytest.mark.parametrize("codec", [None, "squinch6"])
def test_reduce_scatter(world: Any, codec: str | None) -> None:
    checks.check_reduce_scatter(*world, codec)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.int64, np.bool_, checks.BFLOAT16], ids=lambda dtype: dtype_name(np.dtype(dtype))
)
def test_all_gather(world: Any, dtype: Any) -> None:
    checks.check_all_gather(*world, dtype)


def test_compressed_all_gather(world: Any) -> None:
    checks.check_compressed_all_gather(*world)


@pytest.mark.parametrize("dtype", [np.float32, np.complex128, checks.BFLOAT16], ids=lambda dtype: dtype_name(np.dtype(dtype)))
def test_broadcast(world: Any, dtype: Any) -> None:
    checks.check_broadcast(*world, dtype)


def test_gather_and_scatter(world: Any) -> None:
    checks.check_gather_scatter(*world)


def test_all_to_all(world: Any) -> None:
    checks.check_all_to_all(*world)


def test_barrier(world: Any) -> None:
    checks.check_barrier(*world)


def test_views(world: Any) -> None:
    checks.check_views(*world)


def test_async(world: Any) -> None:
    checks.check_async(*world)


def test_messages(world: Any) -> None:
    checks.check_messages(*world)


def test_split(world: Any) -> None:
    checks.check_split(*world)


def test_several_codec_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "POOLED_CHUNK_BYTES", 0)

    def body(comm: Communicator) -> list[np.ndarray]:
        arrays = [checks.random_array(comm.rank, 300_007) for _ in range(3)]
        comm.allreduce(arrays[0], codec="squinch6-sr")
        comm.allreduce(arrays[1])
        comm.reduce_scatter(arrays[2][:50_000], np.repeat(arrays[2][:50_000], 3), codec="squinch6")
        return arrays

    one, several = (run_world(3, body, codec_threads=threads, min_compress_bytes=0) for threads in (1, 4))
    for first, second in zip(one, several, strict=True):
        checks.same_bits([np.concatenate(first), np.concatenate(second)])


def test_when_an_interrupted_call_is_left_no_thread_works_on_its_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "POOLED_CHUNK_BYTES", 0)
    encode, working, begun = CodecCoder.outgoing, Counter[str](), threading.Event()

    def slowly(*args: Any) -> np.ndarray:
        thread = threading.current_thread().name
        if thread.startswith("squinchcomm-codec-0"):
            working[thread] += 1
            begun.set()
            time.sleep(0.3)
            working[thread] -= 1
        return encode(*args)

    monkeypatch.setattr(CodecCoder, "outgoing", slowly)
    rendezvous = InprocRendezvous(3)

    def reduce(rank: int, error: type[BaseException]) -> None:
        with join(
            get_backend("inproc", TransportOptions()), rank, lambda blob: rendezvous.exchange(rank, blob, 20.0), config
        ) as comm:
            with pytest.raises(error):
                comm.allreduce(checks.random_array(rank, 300_007), codec="squinch6")
            assert not any(working.values())

    def interrupt() -> None:
        assert begun.wait(20.0)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    config = Config(codec_threads=4, min_compress_bytes=0)
    with ThreadPoolExecutor(3) as others:
        running = [others.submit(interrupt), *(others.submit(reduce, rank, CommunicatorAborted) for rank in (1, 2))]
        reduce(0, KeyboardInterrupt)
    for each in running:
        each.result()


def _gradients(rank: int, common: float) -> np.ndarray:
    """Gaussian elements, of which all ranks share the part `common` of the power, as gradients of one step do."""
    rng = np.random.default_rng(100 + rank)
    shared = np.random.default_rng(99).standard_normal(1 << 19)
    return (np.sqrt(common) * shared + np.sqrt(1 - common) * rng.standard_normal(1 << 19)).astype(np.float32)


def _relative_error(ranks: int, common: float) -> float:
    def body(comm: Communicator) -> np.ndarray:
        array = _gradients(comm.rank, common)
        comm.allreduce(array, codec="squinch6")
        return array

    expected = np.sum([_gradients(rank, common) for rank in range(ranks)], axis=0, dtype=np.float64)
    return float(np.linalg.norm(run_world(ranks, body)[0] - expected) / np.linalg.norm(expected))


def test_error_of_a_compressed_allreduce_does_not_grow_with_the_ranks() -> None:
    # Two quantisations of 26.35 dB each leave 26.35 - 10 log10(1 + (n-1)/n) dB of independent data.
    errors = {ranks: _relative_error(ranks, common=0.0) for ranks in (2, 4, 8)}
    assert -20 * np.log10(errors[4]) >= 23.8
    assert errors[8] <= 1.5 * errors[2]
    assert -20 * np.log10(_relative_error(4, common=0.5)) >= 24.5
