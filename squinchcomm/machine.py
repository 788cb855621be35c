"""What the cost model has to know of hosts, links and codecs; given, measured, or as on the machine of the reports."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Self

from squinchcomm.errors import ConfigError

_TCP_IP_BYTES = 52  # IPv4, TCP and its timestamps, in every packet
_ETHERNET_BYTES = 14
_ELEMENTS = 1 << 23  # 32 MiB of float32; as many arrays as are measured at once are more than the caches of most hosts hold
_TERMS = 4  # inputs of a measured sum
_SATURATING_CORES = 4
_BUDGET_S = 0.03  # a measurement
_START_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Constants of one host and of the link that its ranks share. All hosts are alike.

    Attributes:
        link_bits_per_s: Rate of a host's link, each way.
        link_efficiency: Part of that rate that two hosts reach, above 0, at most 1.
        incast: Part that every doubling of the hosts that send to one host adds to the time of the bytes.
        link_burst_bytes: What a shaped link lets pass before its rate applies; 0 for a real one.
        mtu: Bytes of an IP packet.
        latency_s: From a frame ready on one host to its receiver on another awake, beyond the processors' work.
        local_latency_s: The same between ranks of one host.
        call_s: Processor time of a rank to begin a hop and to wake up at its end.
        frame_s: Processor time of a frame to another host, its sender and its receiver together, but for the payload.
        local_frame_s: The same between ranks of one host.
        chunk_s: Processor time to put a contribution into a frame and to sum it there, but for its elements.
        encoded_chunk_s: The same where it travels encoded.
        socket_bytes_per_s: Payload that one processor sends and receives through sockets, checksums included.
        memory_bytes_per_s: Payload that a host copies in its memory, all its processors together.
        add_bytes_per_s: Arrays that one processor adds to a sum, counted in bytes of each.
        cores: Processors of a host; a fraction if several hosts are namespaces of one machine.

    Raises:
        ConfigError: a constant that no machine has.
    """

    link_bits_per_s: float = 10e9
    link_efficiency: float = 0.97
    incast: float = 0.05
    link_burst_bytes: float = 0.0
    mtu: int = 1500
    latency_s: float = 50e-6
    local_latency_s: float = 30e-6
    call_s: float = 50e-6
    frame_s: float = 50e-6
    local_frame_s: float = 40e-6
    chunk_s: float = 30e-6
    encoded_chunk_s: float = 45e-6
    socket_bytes_per_s: float = 1.4e9
    memory_bytes_per_s: float = 40e9
    add_bytes_per_s: float = 40e9
    cores: float = 8.0

    def __post_init__(self) -> None:
        for name in (
            "link_bits_per_s",
            "link_efficiency",
            "socket_bytes_per_s",
            "memory_bytes_per_s",
            "add_bytes_per_s",
            "cores",
        ):
            _require(0 < getattr(self, name) < float("inf"), name, getattr(self, name), "above 0")
        for name in (
            "latency_s",
            "local_latency_s",
            "call_s",
            "frame_s",
            "local_frame_s",
            "chunk_s",
            "encoded_chunk_s",
            "link_burst_bytes",
            "incast",
        ):
            _require(0 <= getattr(self, name) < float("inf"), name, getattr(self, name), "0 or above")
        _require(self.link_efficiency <= 1, "link_efficiency", self.link_efficiency, "at most 1")
        _require(576 <= self.mtu <= 65535, "mtu", self.mtu, "576 to 65535 bytes")

    @property
    def wire_factor(self) -> float:
        """Bytes on an Ethernet link for a byte through TCP over IPv4: 1.046 with packets of 1500 bytes."""
        return (self.mtu + _ETHERNET_BYTES) / (self.mtu - _TCP_IP_BYTES)

    def divided(self, hosts: int) -> Self:
        """The machine as each of `hosts` namespaces on it has it: processors and memory are shared, links are not."""
        return replace(self, cores=self.cores / hosts, memory_bytes_per_s=self.memory_bytes_per_s / hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCost:
    """What a codec costs. Rates are of one processor of a busy host, in bytes of float32 per second, whatever the arrays' type.

    Attributes:
        name: As in the registry.
        lossless: Arrays travel as they are; the rates do not matter.
        bits: Encoded bits of an element.
        tile: Elements that are never split.
        encode_bytes_per_s: Encoding.
        decode_bytes_per_s: Decoding into an array.
        reduce_bytes_per_s: Decoding and adding, counted in bytes of each input.

    Raises:
        ConfigError: a rate or size that no codec has.
    """

    name: str
    lossless: bool
    bits: float
    tile: int
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    reduce_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("bits", "tile", "encode_bytes_per_s", "decode_bytes_per_s", "reduce_bytes_per_s"):
            _require(0 < getattr(self, name) < float("inf"), name, getattr(self, name), "above 0")


# GB/s of float32 on one core of the machine of benchmarks/reports/2026-11-29-codecs.md: encode, decode, reduce.
REPORTED_RATES = {
    "none": (19.0, 18.0, 50.0),
    "bf16": (25.0, 30.0, 60.0),
    "int8": (25.0, 31.0, 60.0),
    "squinch6": (20.0, 30.0, 50.0),
    "squinch6-sr": (6.8, 30.0, 50.0),
}


@lru_cache(maxsize=64)
def codec_cost(name: str, rates: tuple[float, float, float] | None = None) -> CodecCost:
    """The cost of a codec, the same on every host.

    Args:
        name: As in the registry.
        rates: GB/s of float32 on one processor: encode, decode, reduce. None takes those of the codec report, and for a codec that is
            not in it the lowest of each.

    Raises:
        ConfigError: the codec is unknown, or a rate is not above 0.
    """
    from squinchcomm.kernels.registry import get_codec

    codec = get_codec(name)
    reported = [REPORTED_RATES[name]] if name in REPORTED_RATES else [*REPORTED_RATES.values()]
    encode, decode, reduce = (1e9 * min(each) for each in zip(*([rates] if rates else reported), strict=True))
    return CodecCost(
        name=name,
        lossless=codec.lossless,
        bits=codec.bits_per_element,
        tile=1 if codec.lossless else codec.tile_size,
        encode_bytes_per_s=encode,
        decode_bytes_per_s=decode,
        reduce_bytes_per_s=reduce,
    )


@lru_cache(maxsize=64)
def measure_codec(name: str) -> CodecCost:
    """As `codec_cost`, with rates measured here while up to four processors are at work, on arrays that no cache holds.

    Takes about 0.3 s once the kernels are loaded; later calls return the first's result. Rates differ from run to run and from host
    to host. Ranks that are to choose alike share those of one of them.
    """
    import numpy as np

    from squinchcomm.kernels import get_codec, warm_up

    warm_up()
    codec = get_codec(name)
    values = np.resize(np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32), _ELEMENTS)
    arrays = [values.copy() for _ in range(_measured_cores())]
    encoded = [codec.encode(each, seed=1) for each in arrays]
    inputs = [[each.copy() for _ in range(_TERMS)] for each in encoded]
    encode = _rate([partial(codec.encode, *each, seed=1) for each in zip(arrays, encoded, strict=True)], values.nbytes)
    decode = _rate(
        [partial(codec.decode, data, values.size, out) for data, out in zip(encoded, arrays, strict=True)], values.nbytes
    )
    reduce = _rate([partial(codec.reduce, data, out) for data, out in zip(inputs, arrays, strict=True)], _TERMS * values.nbytes)
    return codec_cost(name, (encode / 1e9, decode / 1e9, reduce / 1e9))


def measure(machine: Machine | None = None) -> Machine:
    """`machine` with the processors, the memory and the additions of this host; takes about 0.2 s.

    Latency, link and the costs of frames and sockets take two hosts to measure: they stay as given.
    """
    import numpy as np

    from squinchcomm.collectives.reduction import reduce_arrays

    # One processor does not saturate the memory of a host, and four mostly do.
    inputs: list[Any] = [np.ones(_ELEMENTS, np.float32) for _ in range(_measured_cores())]
    targets = [np.empty_like(each) for each in inputs]
    pairs = [*zip(targets, inputs, strict=True)]
    copy = len(pairs) * _rate([partial(np.copyto, *pair) for pair in pairs], inputs[0].nbytes)
    # By one thread beside threads that copy: two that add would wait for each other's interpreter lock, which ranks do not share.
    sums = partial(reduce_arrays, np.split(inputs[0], _TERMS), targets[0][: _ELEMENTS // _TERMS], "sum", 1)
    add = _rates([sums, *(partial(np.copyto, *pair) for pair in pairs[1:])], inputs[0].nbytes)[0]
    cores = float(len(os.sched_getaffinity(0)))
    return replace(machine or Machine(), cores=cores, memory_bytes_per_s=copy, add_bytes_per_s=add)


def _measured_cores() -> int:
    return min(len(os.sched_getaffinity(0)), _SATURATING_CORES)


def _rate(calls: Sequence[Callable[[], object]], nbytes: int) -> float:
    """Bytes per second of a processor, the mean of those that repeat one call each at the same time."""
    return statistics.fmean(_rates(calls, nbytes))


def _rates(calls: Sequence[Callable[[], object]], nbytes: int) -> list[float]:
    """Bytes per second of each call, of `nbytes` each, repeated by processors of their own at the same time."""
    for call in calls:  # the first time, which also fails here if it fails
        call()
    begin = threading.Barrier(len(calls), timeout=_START_S)

    def timed(call: Callable[[], object], processor: int) -> float:
        begin.wait()
        os.sched_setaffinity(0, {processor})  # of this thread: two on one processor would take turns and not share the memory
        return nbytes / _median_s(call)

    with ThreadPoolExecutor(len(calls)) as pool:
        try:
            return list(pool.map(timed, calls, sorted(os.sched_getaffinity(0))))
        except BaseException:
            begin.abort()  # a thread that could not be started is waited for by the others
            raise


def _median_s(call: Callable[[], object]) -> float:
    """Seconds of the median call of those that fit into the budget, at least three."""
    times: list[float] = []
    end = time.perf_counter() + _BUDGET_S
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {value!r}; give a number {allowed}")
