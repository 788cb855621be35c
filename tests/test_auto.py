"""The codec "auto": the same choice on all ranks, from constants on which they agree."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from squinchcomm import joining
from squinchcomm.communicator import Communicator
from squinchcomm.config import Config
from squinchcomm.cost import HIERARCHICAL, PAIRWISE, Layout, predict
from squinchcomm.crossover import LEAST_GAIN, Crossover
from squinchcomm.errors import ConfigError, MismatchError
from squinchcomm.machine import Machine, codec_cost
from squinchcomm.policy import choose_codec
from squinchcomm.transport.inproc import InprocRendezvous
from squinchcomm.transport.registry import get_backend
from tests.worlds import run_world

MIB = 1 << 20
SIZES = [1 << power for power in range(10, 33)]
SQUINCH6, NONE = codec_cost("squinch6"), codec_cost("none")


def crossover(hosts: str = "abcd", algorithm: str = "auto", **constants: Any) -> Crossover:
    return Crossover(hosts, replace(Machine(), **constants), SQUINCH6, algorithm)


@pytest.mark.parametrize("hosts", ["ab", "abcd", "aabb", "aaaabbbb"])
def test_slower_links_and_larger_arrays_are_compressed(hosts: str) -> None:
    least = [crossover(hosts, link_bits_per_s=rate).least_bytes() or 1 << 60 for rate in (1e8, 1e9, 1e10, 1e11, 1e13)]
    # On links where time is overhead the number of chunks decides, which jumps with the size.
    assert least[:3] == sorted(least[:3]) and max(least[:3]) <= min(least[3:])
    assert least[0] <= 65536
    for rate, surely in ((1e8, 65536), (1e9, MIB), (1e10, 16 * MIB)):
        decided = crossover(hosts, link_bits_per_s=rate)
        assert all(decided.pays(size) for size in SIZES if size >= surely)
    slow_codec = replace(SQUINCH6, encode_bytes_per_s=1e8, decode_bytes_per_s=1e8, reduce_bytes_per_s=1e8)
    assert Crossover(hosts, replace(Machine(), link_bits_per_s=1e12), slow_codec).least_bytes() is None


@pytest.mark.parametrize("algorithm", ["flat", "hierarchical"])
def test_it_is_the_choice_of_the_model_for_the_algorithm_that_runs(algorithm: str) -> None:
    name = HIERARCHICAL if algorithm == "hierarchical" else PAIRWISE
    layout = Layout.of("aaaabbbb")
    seen = set()
    for rate in (1e9, 1e10, 1e11, 1e12):
        machine = replace(Machine(), link_bits_per_s=rate)
        decided = Crossover("aaaabbbb", machine, SQUINCH6, algorithm)
        for size in SIZES[7:]:
            times = [predict(name, layout, size, codec, machine).time_s for codec in (SQUINCH6, NONE)]
            assert decided.pays(size) == (times[0] < (1 - LEAST_GAIN) * times[1])
            seen.add(decided.pays(size))
    assert seen == {True, False}


def test_bytes_of_the_type_count() -> None:
    decided = crossover(link_bits_per_s=3e10, cores=2.0)
    least = [min(count for count in SIZES if decided.pays(count * itemsize, itemsize)) for itemsize in (2, 4, 8)]
    assert least == sorted(least, reverse=True) and least[0] > least[2]  # elements: the wider they are, the more is saved


def chosen(requested: str | None, default: str, dtype: Any = np.float32, *, pays: bool, **more: Any) -> tuple[str, str | None]:
    arguments = {"nbytes": MIB, "reduction": "sum", "min_compress_bytes": 65536} | more
    codec, reason = choose_codec(requested, default, dtype=np.dtype(dtype), pays=lambda: pays, **arguments)
    return codec.name, reason


def test_policy() -> None:
    assert chosen(None, "auto", pays=True) == ("squinch6", None)
    assert chosen(None, "auto", pays=False) == ("none", "crossover")
    assert chosen("auto", "none", pays=True) == ("squinch6", None)
    assert chosen("squinch6", "auto", pays=False) == ("squinch6", None)  # who names a codec gets it
    assert chosen(None, "squinch6", pays=False) == ("squinch6", None)
    assert chosen(None, "auto", pays=False, nbytes=1000) == ("none", "small")
    for requested in (None, "auto"):  # it decides, so that nothing is an error
        assert chosen(requested, "auto", np.int32, pays=True) == ("none", "dtype")
        assert chosen(requested, "auto", np.float64, pays=True) == ("none", "dtype")
        assert chosen(requested, "auto", pays=True, reduction="max") == ("none", "op")
        assert chosen(requested, "auto", pays=True, compress="off") == ("none", "off")
    assert chosen(None, "auto", pays=True, compress="explicit") == ("none", "explicit")
    assert chosen("auto", "auto", pays=True, compress="explicit") == ("squinch6", None)


@pytest.mark.parametrize("hosts", ["", "abc", "aabbc"])
def test_ranks_agree_on_what_they_measured(hosts: str) -> None:
    def body(comm: Communicator) -> Any:
        found = comm.crossover
        assert found is not None
        assert comm.stats.collectives == 0  # what measured does not count as the user's
        assert 0 < found.machine.cores < float("inf")
        return found.layout, found.machine, found.encoded, [found.pays(size) for size in SIZES]

    results = run_world(len(hosts) or 3, body, hosts=hosts, codec="auto")
    assert all(result == results[0] for result in results)


def test_calls_of_all_sizes_types_and_kinds_match(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = crossover("aabb", link_bits_per_s=1e9)
    monkeypatch.setattr(joining, "survey", lambda comm: decided)

    def body(comm: Communicator) -> tuple[int, int]:
        rng = np.random.default_rng(comm.rank)
        for count in (1, 100, 20_000, 70_001, 1_000_000):
            for dtype in (np.float32, np.float16, np.float64, np.int32):
                comm.allreduce(rng.integers(-9, 9, count).astype(dtype))
            whole = rng.standard_normal(comm.world_size * count, dtype=np.float32)
            comm.reduce_scatter(np.empty(count, np.float32), whole)
        exact = np.full(4096, comm.rank + 0.1, np.float32)
        comm.allreduce(exact, codec="auto")
        comm.barrier()
        assert np.all(exact == exact[0])
        return comm.stats.compressed, comm.stats.uncompressed["small"]

    compressed, small = run_world(4, body, hosts="aabb", codec="auto")[0]
    assert compressed > 4 and small > 4


def test_below_the_crossover_sums_are_exact_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "survey", lambda comm: crossover("abcd", link_bits_per_s=1e13, socket_bytes_per_s=1e13))

    def body(comm: Communicator) -> None:
        values = np.random.default_rng(comm.rank).standard_normal(1 << 18, dtype=np.float32)
        exact = values.copy()
        comm.allreduce(exact, codec="none")
        for _ in range(3):
            again = values.copy()
            comm.allreduce(again)
            assert np.array_equal(again, exact)
        assert dict(comm.stats.uncompressed) == {"crossover": 3}
        comm.allreduce(values, codec="squinch6")
        assert comm.stats.compressed == 1

    run_world(4, body, hosts="abcd", codec="auto")


def test_an_emulated_link_is_not_measured_and_every_rank_has_one() -> None:
    def body(comm: Communicator) -> None:
        found = comm.crossover
        assert found is not None
        assert (found.layout, found.machine.link_bits_per_s) == (Layout.even(3, 3), 1e8)
        assert found.pays(MIB)

    run_world(3, body, hosts="aaa", codec="auto", link_rate="100Mbit")


def test_parts_of_a_group_inherit_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []
    real = joining.survey
    monkeypatch.setattr(joining, "survey", lambda comm: times.append(1) or real(comm))

    def body(comm: Communicator) -> None:
        part = comm.split(comm.rank % 2)
        assert part is not None and part.crossover is not None and comm.crossover is not None
        assert part.crossover.machine == comm.crossover.machine
        assert part.crossover.layout == Layout.even(2, 2)
        part.allreduce(np.ones(MIB, np.float32))
        part.close()
        comm.abort()
        with comm.shrink() as after:
            assert after.crossover is not None and after.crossover.machine == comm.crossover.machine
            after.allreduce(np.ones(MIB, np.float32))

    run_world(4, body, hosts="aabb", codec="auto")
    assert len(times) == 4


def test_a_call_cannot_ask_for_it_where_nothing_was_measured() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match="SQUINCH_CODEC=auto"):
            comm.allreduce(np.ones(MIB, np.float32), codec="auto")
        comm.allreduce(np.ones(MIB, np.float32), codec="squinch6")  # nothing was sent, the group is fine

    run_world(2, body)


def test_a_rank_alone_has_nothing_to_decide() -> None:
    def body(comm: Communicator) -> None:
        values = np.arange(MIB, dtype=np.float32)
        comm.allreduce(values)
        assert np.array_equal(values, np.arange(MIB, dtype=np.float32))
        assert comm.crossover is None and dict(comm.stats.uncompressed) == {"crossover": 1}

    run_world(1, body, codec="auto")


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (({"codec": "auto"}, {"codec": "squinch6"}), "codec: rank 0 has auto, rank 1 has any but auto"),
        (({"codec": "squinch6"}, {"codec": "auto"}), "codec: rank 0 has any but auto, rank 1 has auto"),
        (({"codec": "auto", "link_rate": "1Gbit"}, {"codec": "auto"}), "link_rate: rank 0 has 1Gbit, rank 1 has None"),
    ],
)
def test_ranks_that_do_not_all_ask_for_it_are_told(settings: tuple[dict[str, str], ...], what: str) -> None:
    meeting = InprocRendezvous(2)
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            joining.join(get_backend("inproc"), rank, lambda blob: meeting.exchange(rank, blob, 20.0), Config(**settings[rank]))
        except MismatchError as error:
            errors.append(error)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 2
    assert all(what in str(error) for error in errors)
