"""The cost model: its bytes and frames are those of real runs, its times add up, its choices are the fastest."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from squinchcomm import machine as machine_module
from squinchcomm.communicator import Communicator
from squinchcomm.cost import DIRECT, HIERARCHICAL, PAIRWISE, RING, Layout, algorithms, choose, predict
from squinchcomm.errors import ConfigError
from squinchcomm.machine import REPORTED_RATES, CodecCost, Machine, _rates, codec_cost, measure, measure_codec
from tests.worlds import run_world

MIB = 1 << 20
NONE, SQUINCH6 = codec_cost("none"), codec_cost("squinch6")
MACHINE = Machine()
NO_TIME = ("latency_s", "local_latency_s", "call_s", "frame_s", "local_frame_s", "chunk_s", "encoded_chunk_s")
FREE = replace(MACHINE, **dict.fromkeys(NO_TIME, 0.0), socket_bytes_per_s=1e30, cores=1e6)
INSTANT = {"encode_bytes_per_s": 1e30, "decode_bytes_per_s": 1e30, "reduce_bytes_per_s": 1e30}


@pytest.mark.parametrize("codec", [NONE, SQUINCH6], ids=lambda codec: codec.name)
@pytest.mark.parametrize(
    ("hosts", "algorithm", "nbytes"),
    [
        ("abc", PAIRWISE, 3 * MIB),
        ("aabb", PAIRWISE, 4 * MIB),
        ("aabb", HIERARCHICAL, 4 * MIB),
        ("aaabbbccc", HIERARCHICAL, 9 * MIB),
        ("aaab", HIERARCHICAL, 4 * MIB),
        ("aaaa", PAIRWISE, MIB),
    ],
)
def test_frames_and_bytes_are_those_of_a_run(hosts: str, algorithm: str, nbytes: int, codec: CodecCost) -> None:
    def body(comm: Communicator) -> tuple[int, int]:
        transport, sent = comm._transports[0], comm._channel._sent
        before = list(transport.sent_bytes), list(sent)
        comm.allreduce(np.ones(nbytes // 4, np.float32), codec=codec.name)
        far = [peer for peer in range(comm.world_size) if hosts[peer] != hosts[comm.rank]]
        return sum(sent) - sum(before[1]), sum(transport.sent_bytes[peer] - before[0][peer] for peer in far)

    setting = "hierarchical" if algorithm == HIERARCHICAL else "flat"
    done = run_world(len(hosts), body, hosts=hosts, algorithm=setting)
    frames, sent = (sum(each[index] for host, each in zip(hosts, done, strict=True) if host == "a") for index in (0, 1))
    found = predict(algorithm, Layout.of(hosts), nbytes, codec, MACHINE)
    assert found.frames == pytest.approx(frames)
    assert found.wire_bytes == pytest.approx(sent * MACHINE.wire_factor, rel=0.01)


def test_a_direct_exchange_sends_everything_to_everybody() -> None:
    found = predict(DIRECT, Layout.even(4, 4), 4096, NONE, MACHINE)
    assert found.frames == 3
    assert found.wire_bytes == pytest.approx(3 * 4096 * MACHINE.wire_factor, rel=0.05)


@pytest.mark.parametrize(("ranks", "hosts"), [(8, 2), (64, 8), (1024, 128), (100_000, 12_500)])
def test_where_only_links_take_time_the_bytes_decide(ranks: int, hosts: int) -> None:
    layout, size, codec = Layout.even(ranks, hosts), 1 << 34, replace(SQUINCH6, **INSTANT)
    machine = replace(FREE, memory_bytes_per_s=1e30, add_bytes_per_s=1e30, link_efficiency=1.0, incast=0, link_bits_per_s=8e9)
    per_host = layout.most
    flat = 2 * per_host * (ranks - per_host) / ranks * size * SQUINCH6.bits / 32 * machine.wire_factor
    layered = 2 * (hosts - 1) / hosts * size * SQUINCH6.bits / 32 * machine.wire_factor
    assert predict(PAIRWISE, layout, size, codec, machine).time_s == pytest.approx(flat / 1e9, rel=0.02)
    assert predict(HIERARCHICAL, layout, size, codec, machine).time_s == pytest.approx(layered / 1e9, rel=0.02)
    assert predict(RING, layout, size, codec, machine).time_s == pytest.approx(
        2 * (ranks - 1) / ranks * size * machine.wire_factor / 1e9
    )


def test_headers_cost_4_to_6_percent_with_packets_of_1500_bytes() -> None:
    assert 1.04 < MACHINE.wire_factor < 1.06
    assert replace(MACHINE, mtu=9000).wire_factor < 1.01


def test_types_of_two_bytes_travel_as_they_are_or_at_the_codecs_size() -> None:
    layout = Layout.even(4, 4)

    def sent(codec: CodecCost, nbytes: int, itemsize: int) -> float:
        return predict(PAIRWISE, layout, nbytes, codec, MACHINE, itemsize=itemsize).wire_bytes

    assert sent(NONE, 8 * MIB, 2) == pytest.approx(sent(NONE, 8 * MIB, 4))
    assert sent(SQUINCH6, 8 * MIB, 2) == pytest.approx(sent(SQUINCH6, 16 * MIB, 4), rel=0.01)


def test_processors_are_shared_by_the_ranks_of_a_host() -> None:
    fast = replace(MACHINE, link_bits_per_s=1e15, latency_s=0)
    times = [predict(PAIRWISE, Layout.even(8, 8), 64 * MIB, NONE, replace(fast, cores=cores)).time_s for cores in (0.25, 0.5)]
    assert times[0] / times[1] == pytest.approx(2, rel=0.1)
    shared = MACHINE.divided(4)
    assert (shared.cores, shared.memory_bytes_per_s) == (MACHINE.cores / 4, MACHINE.memory_bytes_per_s / 4)
    assert shared.link_bits_per_s == MACHINE.link_bits_per_s


def test_link_and_processors_hide_each_other_where_one_is_much_slower() -> None:
    ratios = []
    for rate in (1e8, 1e9, 2.6e9, 1e10, 1e12):
        found = predict(PAIRWISE, Layout.even(2, 2), 256 * MIB, NONE, replace(MACHINE, link_bits_per_s=rate, cores=1.0))
        ratios.append(found.time_s / max(found.link_s, found.processor_s))
    assert ratios[0] == pytest.approx(1, abs=0.02) and ratios[-1] == pytest.approx(1, abs=0.02)
    assert max(ratios) <= 2**0.5 + 0.02
    assert max(ratios) > 1.3  # where both take as long


def test_chunks_cost_what_direct_exchanges_do_not_pay() -> None:
    layout, lazy = Layout.even(4, 4), replace(FREE, chunk_s=1e-3, encoded_chunk_s=2e-3, cores=1.0)

    def added_ms(name: str, codec: CodecCost) -> float:
        return 1e3 * sum(
            sign * predict(name, layout, 1 << 16, codec, machine).processor_s for sign, machine in ((1, lazy), (-1, FREE))
        )

    assert added_ms(DIRECT, NONE) == pytest.approx(0, abs=0.1)
    assert added_ms(PAIRWISE, NONE) == pytest.approx(3, abs=0.1)  # contributions, but no sums
    assert added_ms(PAIRWISE, SQUINCH6) == pytest.approx(2 * 3, abs=0.1)


@pytest.mark.parametrize(("codec", "chunk_ms"), [(NONE, 0), (SQUINCH6, 1)], ids=["none", "squinch6"])
def test_frames_inside_a_host_have_a_cost_of_their_own(codec: CodecCost, chunk_ms: int) -> None:
    """2 hosts of 4 ranks, 8 shards of one chunk: the host's ranks send 4 + 4 frames to the other host, and 24 + 24 inside."""
    layout, size = Layout.even(8, 2), 1 << 16
    near, far, chunks = (
        replace(FREE, cores=1.0, **{name: 1e-3})
        for name in ("local_frame_s", "frame_s", "encoded_chunk_s" if chunk_ms else "chunk_s")
    )

    def added_ms(name: str, machine: Machine) -> float:
        found = [predict(name, layout, size, codec, each).processor_s for each in (machine, replace(FREE, cores=1.0))]
        return 1e3 * (found[0] - found[1])

    assert added_ms(HIERARCHICAL, near) == pytest.approx(48)
    assert added_ms(HIERARCHICAL, far) == pytest.approx(8)
    # Contributions between hosts, and those inside, which are never encoded.
    assert added_ms(HIERARCHICAL, chunks) == pytest.approx(4 + 24 * (not chunk_ms))
    assert added_ms(PAIRWISE, near) == pytest.approx(2 * 4 * 3)
    assert added_ms(PAIRWISE, far) == pytest.approx(2 * 4 * 4)


def test_many_senders_share_a_link_less_well() -> None:
    machine = replace(FREE, link_bits_per_s=1e8, link_efficiency=0.5, incast=0.1)
    found = [predict(PAIRWISE, Layout.even(ranks, ranks), 64 * MIB, NONE, machine) for ranks in (2, 9)]
    slower = [each.link_s / (each.wire_bytes * 8 / 1e8) for each in found]
    assert slower == pytest.approx([2.0, 2.0 * 1.3])
    two_full_hosts = predict(PAIRWISE, Layout.even(8, 2), 64 * MIB, NONE, machine)
    assert two_full_hosts.link_s == pytest.approx(two_full_hosts.wire_bytes * 8 / 1e8 * 2)


def test_a_burst_passes_at_once() -> None:
    slow = replace(FREE, link_bits_per_s=1e6, link_efficiency=1.0)
    times = [
        predict(DIRECT, Layout.even(2, 2), 8192, NONE, replace(slow, link_burst_bytes=burst)).time_s for burst in (0, 4096, 1e6)
    ]
    assert times[0] - times[1] == pytest.approx(4096 * 8 / 1e6, rel=1e-3)
    assert times[2] < 1e-4


worlds = st.integers(1, 64).flatmap(lambda hosts: st.integers(hosts, 8 * hosts).map(lambda ranks: Layout.even(ranks, hosts)))


@given(worlds, st.integers(0, 1 << 32), st.sampled_from([NONE, SQUINCH6]), st.sampled_from([1e8, 1e10, 4e11]))
def test_times_add_up_and_better_machines_are_faster(layout: Layout, nbytes: int, codec: CodecCost, rate: float) -> None:
    machine = replace(MACHINE, link_bits_per_s=rate)
    better = replace(machine, link_bits_per_s=2 * rate, latency_s=1e-6, frame_s=1e-6, cores=64.0)
    for name in (*algorithms(layout, nbytes, codec), RING):
        found = predict(name, layout, nbytes, codec, machine)
        # No quicker than what takes longest, no slower than everything one after the other.
        assert found.latency_s + max(found.link_s, found.processor_s) <= found.time_s * (1 + 1e-9)
        assert found.time_s <= (found.latency_s + found.link_s + found.processor_s) * (1 + 1e-9)
        assert predict(name, layout, nbytes, codec, better).time_s <= found.time_s * (1 + 1e-9)


@given(worlds, st.integers(1, 1 << 32), st.sampled_from([NONE, SQUINCH6]))
def test_the_choice_is_the_fastest(layout: Layout, nbytes: int, codec: CodecCost) -> None:
    names = algorithms(layout, nbytes, codec)
    if layout.ranks == 1:
        assert names == ()
        return
    able = names[:1] if DIRECT in names else names
    times = {name: predict(name, layout, nbytes, codec, MACHINE).time_s for name in able}
    chosen = choose(layout, nbytes, codec, MACHINE)
    assert chosen.time_s == times[chosen.algorithm] == min(times.values())
    # From values made anew, as another rank does.
    again = Layout(layout.ranks, layout.hosts, layout.most, layout.least), nbytes, replace(codec), replace(MACHINE)
    assert choose.__wrapped__(*again) == chosen


def test_choices_by_size_and_layout() -> None:
    def chosen(layout: Layout, nbytes: int, codec: CodecCost, **more: Any) -> str:
        return choose(layout, nbytes, codec, replace(MACHINE, link_bits_per_s=1e9), **more).algorithm

    assert chosen(Layout.even(8, 2), 256 * MIB, SQUINCH6) == HIERARCHICAL
    assert chosen(Layout.even(8, 8), 256 * MIB, SQUINCH6) == PAIRWISE
    assert chosen(Layout.even(8, 1), 256 * MIB, SQUINCH6) == PAIRWISE
    assert chosen(Layout.even(4, 4), 1024, NONE) == DIRECT
    assert chosen(Layout.even(9, 9), 1024, NONE) == PAIRWISE  # too many ranks for a direct exchange
    with pytest.raises(ConfigError, match="one rank"):
        chosen(Layout.even(1, 1), 1024, NONE)
    two_hosts = Layout.even(8, 2)
    assert chosen(two_hosts, 256 * MIB, SQUINCH6, setting="flat") == PAIRWISE
    assert chosen(two_hosts, 1024, NONE) == DIRECT
    assert chosen(two_hosts, 1024, NONE, setting="hierarchical") == DIRECT
    assert chosen(two_hosts, 1024, NONE, setting="hierarchical", direct=False) == HIERARCHICAL  # a reduce-scatter
    assert chosen(Layout.even(8, 8), 1024, SQUINCH6, setting="hierarchical") == PAIRWISE  # no host to combine on
    for setting in ("auto", "hierarchical"):
        assert chosen(two_hosts, 256 * MIB, NONE, itemsize=2, half=True, setting=setting) == PAIRWISE
        assert chosen(two_hosts, 256 * MIB, SQUINCH6, itemsize=2, half=True, setting=setting) == HIERARCHICAL


def test_a_choice_costs_microseconds_the_second_time() -> None:
    arguments = Layout.even(64, 8), MIB, SQUINCH6, MACHINE
    choose(*arguments)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            choose(*arguments)
        best = min(best, (time.perf_counter() - start) / 100)
    assert best < 5e-6


def test_worlds_of_100000_ranks_take_no_time() -> None:
    start = time.perf_counter()
    for size in (4096, MIB, 1 << 30, 1 << 40):
        for name in (PAIRWISE, HIERARCHICAL, RING):
            assert 0 < predict(name, Layout.even(100_000, 12_500), size, SQUINCH6, MACHINE).time_s < float("inf")
    assert time.perf_counter() - start < 0.2


def test_layouts() -> None:
    assert Layout.of(["a", "b", "a", "c", "a"]) == Layout(5, 3, 3, 1)
    assert Layout.even(10, 4) == Layout(10, 4, 3, 2)
    for ranks, hosts in ((0, 1), (4, 0), (4, 5), (10**8, 1)):
        with pytest.raises(ConfigError):
            Layout.even(ranks, hosts)
    assert [Layout.even(8, hosts).layered for hosts in (1, 2, 8)] == [False, True, False]


@pytest.mark.parametrize(
    "wrong",
    [{"cores": 0.0}, {"link_bits_per_s": float("nan")}, {"latency_s": -1e-6}, {"mtu": 100}, {"link_efficiency": 1.5}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_constants_that_no_machine_has(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Machine(**wrong)
    with pytest.raises(ConfigError, match="tile"):
        replace(SQUINCH6, tile=0)


def test_a_codec_that_no_report_knows_takes_the_lowest_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(REPORTED_RATES, "bf16")
    codec_cost.cache_clear()
    cost = codec_cost("bf16")
    assert (cost.encode_bytes_per_s, cost.decode_bytes_per_s, cost.reduce_bytes_per_s) == (6.8e9, 18e9, 50e9)
    assert cost.bits == 16
    codec_cost.cache_clear()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_measurement_that_fails_ends(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    def pin(_: int, processors: set[int]) -> None:
        if failing in processors:
            raise OSError("not a processor of this group")

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", pin)
    with pytest.raises(OSError, match="not a processor"):
        _rates([lambda: None, lambda: None], 1)


def test_a_measurement_whose_threads_cannot_start_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    real, starts = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        starts.append(thread)
        if len(starts) == 2:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(machine_module, "_START_S", 1e3)  # the thread that has started need not wait so long
    with pytest.raises(RuntimeError, match="can't start"):
        _rates([lambda: None, lambda: None], 1)
    for thread in starts[:1]:
        thread.join(5.0)
        assert not thread.is_alive()


def test_constants_of_this_machine_can_be_measured() -> None:
    measure_codec.cache_clear()
    machine, codec = measure(replace(MACHINE, latency_s=7e-6)), measure_codec("squinch6")
    assert machine.latency_s == 7e-6
    assert machine.cores >= 1
    for rate in (machine.memory_bytes_per_s, machine.add_bytes_per_s, codec.encode_bytes_per_s, codec.decode_bytes_per_s):
        assert 1e8 < rate < 1e13
    assert (codec.bits, codec.lossless) == (6, False)
    assert measure_codec("squinch6") is codec
