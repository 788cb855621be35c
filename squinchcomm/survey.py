"""What the codec "auto" has to know of processors and links, measured when a group has met, alike on all ranks.

Three numbers scale the constants of the cost model, which are round ones: how fast a processor encodes, how many
processors a rank really gets while all ranks are at work (namespaces, quotas of containers and other jobs do not show in any count of
cores), and how fast a host sends. Every rank measures; all take what the measurements of all ranks say. Takes about 20 ms, and up to
0.15 s more between hosts.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from squinchcomm.cost import Layout
from squinchcomm.crossover import Crossover
from squinchcomm.kernels import get_codec, warm_up
from squinchcomm.machine import REPORTED_RATES, Machine, codec_cost
from squinchcomm.policy import AUTO_CODEC
from squinchcomm.transport.options import parse_rate

if TYPE_CHECKING:
    from squinchcomm.communicator import Communicator

_WORK_S = 0.02
_WORK_ELEMENTS = 1 << 22  # as many as REPORTED_RATES had more than the caches near a core hold
_MAX_THREADS = 16
# The model's 40 GB/s of a host are what two processors copy at best. A few more saturate the memory of any host.
_COPIED_BYTES_PER_S, _SATURATING_CORES = 20e9, 4
# What leaders of hosts send each other until it takes long enough to be a rate and not a latency.
_EXCHANGED_BYTES = (32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20)
_ENOUGH_S = 0.012


def survey(comm: Communicator) -> Crossover:
    """Measures and agrees; a collective call, whose failures are those of any."""
    warm_up()
    machine, hosts = Machine(), places(comm)
    if comm.config.link_rate is not None:
        machine = replace(machine, link_bits_per_s=parse_rate(comm.config.link_rate))
    elif len(set(hosts)) > 1:
        rate = 8 * _sent_bytes_per_s(comm) * machine.wire_factor
        machine = replace(machine, link_bits_per_s=rate, link_efficiency=1.0)
    comm.barrier()
    rates, cores = _gathered(comm, *_processors(comm)).T
    speed = float(np.median(rates)) / (1e9 * REPORTED_RATES[AUTO_CODEC][0])
    encode, decode, reduce = (speed * rate for rate in REPORTED_RATES[AUTO_CODEC])
    per_host = Layout.of(hosts).most * float(np.mean(cores))
    machine = replace(
        machine,
        call_s=machine.call_s / speed,
        frame_s=machine.frame_s / speed,
        local_frame_s=machine.local_frame_s / speed,
        chunk_s=machine.chunk_s / speed,
        encoded_chunk_s=machine.encoded_chunk_s / speed,
        socket_bytes_per_s=machine.socket_bytes_per_s * speed,
        memory_bytes_per_s=_COPIED_BYTES_PER_S * speed * min(per_host, _SATURATING_CORES),
        add_bytes_per_s=machine.add_bytes_per_s * speed,
        cores=per_host,
    )
    return Crossover(hosts, machine, codec_cost(AUTO_CODEC, (encode, decode, reduce)), comm.config.algorithm)


def places(comm: Communicator) -> list[str]:
    """The host of each rank, as the cost model sees it: with an emulated link, which every rank has for itself, one a rank."""
    return [str(rank) for rank in range(comm.world_size)] if comm.config.link_rate is not None else list(comm.hosts)


def _processors(comm: Communicator) -> tuple[float, float]:
    """Bytes per second that one processor encodes, and processors that this rank gets, up to its codec threads."""
    wanted = comm.config.resolved_codec_threads(comm.hosts.count(comm.hosts[comm.rank]))
    count = min(wanted, _MAX_THREADS)
    values = np.resize(np.random.default_rng(0).standard_normal(1 << 14, dtype=np.float32), _WORK_ELEMENTS)
    found: list[tuple[float, float]] = []
    begin = time.perf_counter()
    threads = [threading.Thread(target=lambda: found.append(_work(values, begin + _WORK_S))) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passed_s = time.perf_counter() - begin
    busy_s = sum(seconds for _, seconds in found)
    best_s = min(best for best, _ in found)
    return values.nbytes / best_s, min(1.0, busy_s / (count * passed_s)) * wanted


def _work(values: np.ndarray, end: float) -> tuple[float, float]:
    """Encodes until `end`: seconds of the quickest time, which nothing disturbed, and processor time spent."""
    codec = get_codec(AUTO_CODEC)
    encoded = np.empty(codec.encoded_nbytes(values.size), np.uint8)
    began, best_s = time.thread_time(), float("inf")
    while True:
        start = time.perf_counter()
        codec.encode(values, encoded)
        now = time.perf_counter()
        best_s = min(best_s, now - start)
        if now >= end:
            return best_s, time.thread_time() - began


def _sent_bytes_per_s(comm: Communicator) -> float:
    """Payload that a host sends while it receives as much: the slowest of all, each host sending to the next."""
    leaders = list(dict.fromkeys(comm.hosts.index(host) for host in comm.hosts))
    place = leaders.index(comm.rank) if comm.rank in leaders else None
    pattern = np.random.default_rng(comm.rank).integers(0, 256, 1 << 16, dtype=np.uint8)
    nbytes, slowest_s = 0, 0.0
    for nbytes in _EXCHANGED_BYTES:
        sends, takes = [0] * comm.world_size, [0] * comm.world_size
        if place is not None:
            sends[leaders[(place + 1) % len(leaders)]] = takes[leaders[place - 1]] = nbytes
        outgoing, incoming = np.resize(pattern, sum(sends)), np.empty(sum(takes), np.uint8)
        start = time.perf_counter()
        comm.all_to_all(incoming, outgoing, output_counts=takes, input_counts=sends)
        slowest_s = float(_gathered(comm, time.perf_counter() - start).max())
        if slowest_s >= _ENOUGH_S:
            break
    return nbytes / slowest_s


def _gathered(comm: Communicator, *numbers: float) -> np.ndarray:
    """A row a rank, the same bits everywhere."""
    table = np.empty((comm.world_size, len(numbers)))
    comm.all_gather(table, np.array(numbers))
    return table
