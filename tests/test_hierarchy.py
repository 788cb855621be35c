"""Reductions in two levels: between hosts, and inside them."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from squinchcomm.collectives import call
from squinchcomm.collectives.hierarchy import Topology, allreduce_shards, reduce_scatter_shards
from squinchcomm.config import Config
from squinchcomm.cost import HIERARCHICAL, Layout, choose
from squinchcomm.crossover import Crossover
from squinchcomm.errors import CollectiveTimeout, MismatchError, PeerLost
from squinchcomm.joining import join
from squinchcomm.kernels import get_codec
from squinchcomm.machine import Machine, codec_cost
from squinchcomm.transport.inproc import InprocRendezvous
from squinchcomm.transport.options import TransportOptions
from squinchcomm.transport.registry import get_backend
from tests.conformance import collective_checks as checks
from tests.worlds import outcomes, run_world

TOPOLOGIES = ["aab", "abb", "abab", "aaabbb", "aabcc", "aaaab", "abcabcab", "aaaabbbb"]


@pytest.fixture(params=TOPOLOGIES)
def world(request: Any) -> tuple[Any, int]:
    return functools.partial(run_world, hosts=request.param, algorithm="hierarchical"), len(request.param)


# --- against the oracle, as the flat algorithm


@pytest.mark.parametrize("op", ["sum", "avg", "max", "product"])
def test_allreduce(world: Any, op: str) -> None:
    for dtype in (np.float32, np.float64, np.float16, checks.BFLOAT16):
        checks.check_allreduce(*world, dtype, op, (4097, 30_011))


def test_allreduce_of_integers(world: Any) -> None:
    checks.check_allreduce(*world, np.int32, "sum", (5, 20_011))


@pytest.mark.parametrize("codec", ["squinch6", "squinch6-sr", "bf16", "int8"])
def test_compressed_allreduce(world: Any, codec: str) -> None:
    checks.check_compressed_allreduce(*world, codec, np.float32, "avg", checks.COUNTS)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, checks.BFLOAT16], ids=str)
def test_compressed_allreduce_of_other_floats(world: Any, dtype: Any) -> None:
    checks.check_compressed_allreduce(*world, "squinch6", dtype, "sum", (1, 513, 100_003))


@pytest.mark.parametrize("codec", [None, "squinch6", "bf16"])
def test_reduce_scatter(world: Any, codec: str | None) -> None:
    checks.check_reduce_scatter(*world, codec)


@pytest.mark.parametrize("codec", ["none", "squinch6"])
def test_nonfinite_values_stay_nonfinite(world: Any, codec: str) -> None:
    checks.check_nonfinite(*world, codec)


def test_many_asynchronous_calls(world: Any) -> None:
    checks.check_async(*world)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunk_bytes", [2048, 8192])
def test_small_chunks_and_windows_never_block(
    world: Any, chunk_bytes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, size = world
    monkeypatch.setattr(call, "POOLED_CHUNK_BYTES", 0)

    def body(comm: Any) -> bytes:
        values = checks.random_array(comm.rank, 100_003)
        comm.allreduce(values, "avg", codec="squinch6")
        exact = checks.random_array(comm.rank, 40_003)
        comm.allreduce(exact)
        expected = np.sum([checks.random_array(rank, 40_003).astype(np.float64) for rank in range(size)], axis=0)
        np.testing.assert_allclose(exact, expected, rtol=1e-5, atol=1e-5)
        return values.tobytes()

    results = run(size, body, options=TransportOptions(window=2), chunk_bytes=chunk_bytes, codec_threads=threads)
    assert len(set(results)) == 1


# --- against the definition, bit for bit


@pytest.mark.parametrize("hosts", ["aab", "aaabbb", "abab", "aabcc"])
def test_bits_are_those_of_the_definition(hosts: str) -> None:
    """Host sums in rank order, encoded; the home's own exact, in host order; the total encoded once."""
    size, count = len(hosts), 30_000
    inputs = [checks.random_array(rank, count) for rank in range(size)]

    def body(comm: Any) -> np.ndarray:
        values = inputs[comm.rank].copy()
        comm.allreduce(values, "avg", codec="squinch6")
        return values

    found = run_world(size, body, hosts=hosts, algorithm="hierarchical", min_compress_bytes=0)
    checks.same_bits(found)
    topology, codec = Topology(hosts), get_codec("squinch6")
    shards = allreduce_shards(topology)
    tiles = -(-count // 512)
    bounds = [min(count, tiles * index // len(shards) * 512) for index in range(len(shards))] + [count]
    for index, shard in enumerate(shards):
        part = slice(bounds[index], bounds[index + 1])
        summands: list[Any] = []
        for host, ranks in enumerate(topology.hosts):
            own = [inputs[rank][part] for rank in ranks]
            summands += own if host == shard.host else [codec.reduce_encode(own, own[0].size)]
        total = codec.reduce_encode(summands, part.stop - part.start, scale=1 / size)
        np.testing.assert_array_equal(found[0][part], codec.decode(total, part.stop - part.start))


def test_two_quantisations_whatever_the_hosts() -> None:
    def error(hosts: str) -> float:
        def body(comm: Any) -> np.ndarray:
            values = checks.random_array(comm.rank, 200_000)
            comm.allreduce(values, codec="squinch6")
            return values

        found = run_world(len(hosts), body, hosts=hosts, algorithm="hierarchical")[0]
        exact = np.sum([checks.random_array(rank, 200_000).astype(np.float64) for rank in range(len(hosts))], axis=0)
        return float(((found - exact) ** 2).sum() / (exact**2).sum())

    assert error("aabbccdd") < 1.5 * error("aabb")
    assert 10 * np.log10(1 / error("aabbccdd")) > 23.5


# --- which bytes leave a host


@pytest.mark.parametrize("codec", ["none", "squinch6"])
def test_a_host_sends_what_one_rank_would(codec: str) -> None:
    hosts, count = "aaaabbbb", 1 << 20

    def body(comm: Any) -> tuple[int, int]:
        values = checks.random_array(comm.rank, count)
        before = list(comm._channel.transport.sent_bytes)
        comm.allreduce(values, codec=codec)
        sent = [now - then for now, then in zip(comm._channel.transport.sent_bytes, before, strict=True)]
        return sum(each for each, host in zip(sent, hosts, strict=True) if host != hosts[comm.rank]), sum(sent)

    def beyond(algorithm: str) -> int:
        return sum(far for far, _ in run_world(8, body, hosts=hosts, algorithm=algorithm)[:4])

    payload = count * 4 if codec == "none" else count * 6 // 8
    assert payload <= beyond("hierarchical") <= payload * 1.01 + 20_000
    assert 4 * payload <= beyond("flat") <= 4 * payload * 1.01 + 20_000


def phases(hosts: str, count: int, dtype: Any = np.float32, machine: Machine | None = None, **settings: Any) -> set[int]:
    """Kinds of frames that an all-reduce sends; with a `machine`, in a group that has agreed on its constants."""
    seen: set[int] = set()

    def body(comm: Any) -> None:
        if machine is not None:
            comm._strategy.crossover = Crossover(hosts, machine, codec_cost("squinch6"))
        real = comm._channel.send
        comm._channel.send = lambda ticket, peer, parcel, **more: (
            seen.add(parcel.phase),
            real(ticket, peer, parcel, **more),
        )
        comm.allreduce(np.ones(count, dtype))

    run_world(len(hosts), body, hosts=hosts, **settings)
    return seen


def test_auto_takes_it_for_large_arrays_on_several_hosts() -> None:
    assert phases("aabb", 1 << 17) == {0, 1, 2}
    assert phases("aabb", 1 << 17, codec="squinch6") == {0, 1, 2}
    assert phases("aabb", 1 << 12, codec="squinch6", min_compress_bytes=0) == {0, 1}
    assert phases("aabb", 1 << 12, codec="squinch6", min_compress_bytes=0, algorithm="hierarchical") == {0, 1, 2}
    assert phases("aabb", 1 << 17, algorithm="flat") == {0, 1}
    assert phases("aaaa", 1 << 17) == {0, 1}
    assert phases("abcd", 1 << 17) == {0, 1}
    assert phases("aabb", 1 << 18, np.float16) == {0, 1}, "host sums would be rounded before they are added"


@pytest.mark.parametrize("codec", ["none", "squinch6"])
@pytest.mark.parametrize(("rate", "seen"), [(0.1e9, {0, 1, 2}), (1e12, {0, 1})])
def test_auto_asks_the_model_with_the_constants_of_the_group(codec: str, rate: float, seen: set[int]) -> None:
    machine = Machine(link_bits_per_s=rate, cores=1.0)
    assert phases("aabb", 1 << 16, machine=machine, codec=codec, min_compress_bytes=0) == seen
    layout, cost = Layout.even(4, 2), codec_cost(codec)
    assert (choose(layout, 4 << 16, cost, machine).algorithm == HIERARCHICAL) == (2 in seen)


# --- the shards


@pytest.mark.parametrize("hosts", TOPOLOGIES)
def test_every_rank_of_a_lane_has_as_many_shards(hosts: str) -> None:
    topology = Topology(hosts)
    for shard in (*allreduce_shards(topology), *reduce_scatter_shards(topology)):
        assert shard.combiners[shard.host] == shard.home
        assert [topology.host_of[rank] for rank in shard.combiners] == list(range(len(topology.hosts)))
    assert set(Counter(shard.home for shard in allreduce_shards(topology)).values()) == {1}
    assert [shard.home for shard in reduce_scatter_shards(topology)] == list(range(len(hosts)))


# --- faults


def test_ranks_that_disagree_on_it_never_start() -> None:
    meeting, errors = InprocRendezvous(2), []

    def rank_main(rank: int) -> None:
        config = Config(algorithm=("flat", "auto")[rank])
        try:
            join(get_backend("inproc", TransportOptions()), rank, lambda blob: meeting.exchange(rank, blob, 5.0), config)
        except MismatchError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert all("algorithm" in error for error in errors)


@pytest.mark.parametrize("quitter", [0, 3])
def test_a_rank_that_leaves_in_the_middle_is_named_everywhere(quitter: int) -> None:
    def body(comm: Any) -> None:
        values = checks.random_array(comm.rank, 500_000)
        comm.allreduce(values, codec="squinch6")
        if comm.rank == quitter:
            return
        comm.allreduce(values, codec="squinch6", timeout_s=10.0)

    found = outcomes(4, body, hosts="aabb", algorithm="hierarchical")
    for rank, error in enumerate(found):
        if rank != quitter:
            assert isinstance(error, PeerLost), (rank, error)
            assert error.peer == quitter


def test_a_rank_that_does_not_come_is_a_timeout() -> None:
    def body(comm: Any) -> None:
        values = checks.random_array(comm.rank, 500_000)
        if comm.rank != 1:
            comm.allreduce(values, timeout_s=0.5)
        else:
            time.sleep(1.5)

    found = outcomes(4, body, hosts="aabb", algorithm="hierarchical")
    assert all(isinstance(found[rank], CollectiveTimeout) for rank in (0, 2, 3)), found
