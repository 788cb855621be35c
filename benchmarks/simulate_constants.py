"""The constants behind `simulate_check.py`, from exchanges between namespaces that are not all-reduces.

Processor times of calls, frames, chunks and bytes, latency, and what part of a link is reached; `derive` is arithmetic on what
`calibrate` measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from statistics import fmean, harmonic_mean
from typing import Self, TypeVar

import links
import netns
import numpy as np
from links_ranks import Ranks

from squinchcomm.collectives.plan import MAX_CHUNK_BYTES, Plan
from squinchcomm.cost import doublings
from squinchcomm.machine import CodecCost, Machine, measure, measure_codec

KIB, MIB = 1024, 1024 * 1024
CALIBRATION_RANKS = (2, 4, 8)
FAST, SLOW = "10Gbit", "1Gbit"
RANK = "simulate_rank.py"
_SLOW_S = 0.6  # the longest exchange that a link's constants are made from


@dataclass(frozen=True)
class Link:
    """A kind of link, beside its rate: as in `Machine`."""

    burst_bytes: float
    efficiency: float
    incast: float


@dataclass(frozen=True)
class Exchange:
    """One measured exchange (see `simulate_rank`): the time of all ranks, the mean processor time of one."""

    kind: str
    ranks: int
    hosts: int  # one, or as many as ranks
    part_bytes: int
    link: str
    time_s: float
    processor_s: float

    def demand(self, codec: CodecCost) -> list[float]:
        """How many calls, frames to other hosts and inside one, chunks as they are and encoded, bytes through sockets a rank has."""
        others, encoded, far = self.ranks - 1, self.kind == "reduce", self.hosts > 1
        if self.kind == "move":
            frames = others * max(1, -(-self.part_bytes // MAX_CHUNK_BYTES))
        else:
            frames = others * Plan([0, self.part_bytes // 4], 4, codec.tile if encoded else 1).chunks(0)
        payload = others * self.part_bytes * (codec.bits / 32 if encoded else 1)
        return [
            1.0,
            frames * far,
            frames * (not far),
            frames * (self.kind == "sum"),
            frames * encoded,
            payload * far,
        ]

    def kernels_s(self, codec: CodecCost, machine: Machine) -> float:
        """Processor time in which elements are encoded and summed, or payload is copied: out of frames, or for ranks of the host."""
        others = (self.ranks - 1) * self.part_bytes
        if self.kind == "reduce":
            return others / codec.encode_bytes_per_s + (others + self.part_bytes) / codec.reduce_bytes_per_s
        copied_s = others * machine.cores / machine.memory_bytes_per_s
        if self.kind == "move":
            return copied_s
        return (others + self.part_bytes) / machine.add_bytes_per_s + (copied_s if self.hosts == 1 else 0.0)


@dataclass(frozen=True)
class Kernels:
    """What the machine and codecs do without any exchange."""

    machine: Machine
    codecs: dict[str, CodecCost]

    @classmethod
    def measured(cls, names: list[str]) -> Self:
        """As they are now."""
        measure_codec.cache_clear()
        return cls(measure(), {name: measure_codec(name) for name in names})

    @classmethod
    def mean(cls, samples: list[Self]) -> Self:
        """The rates at which as many bytes of each sample would take as long."""
        machines = [each.machine for each in samples]
        codecs = {name: _mean([each.codecs[name] for each in samples]) for name in samples[0].codecs}
        return cls(_mean(machines), codecs)


_Rated = TypeVar("_Rated", Machine, CodecCost)


def _mean(samples: list[_Rated]) -> _Rated:
    rates = [field.name for field in fields(samples[0]) if field.name.endswith("bytes_per_s")]
    return replace(samples[0], **{name: harmonic_mean([getattr(each, name) for each in samples]) for name in rates})


def exchanges(ranks: int, hosts: int, link: str, plan: list[tuple[str, int, int]]) -> list[Exchange]:
    """Measures each of `plan`: kind, bytes of a part, repeats."""
    made = []
    with netns.Network(hosts) as network, Ranks(ranks, network, script=RANK) as processes:
        network.shape(links.RATES[link])
        processes.ask("open_squinch")
        for kind, part_bytes, repeats in plan:
            answers = processes.ask("exchange", kind=kind, part_bytes=part_bytes, repeats=repeats)
            time_s = float(np.median(np.max([answer["times"] for answer in answers], axis=0)))
            made.append(Exchange(kind, ranks, hosts, part_bytes, link, time_s, fmean(each["processor_s"] for each in answers)))
    return made


def calibrate(names: list[str]) -> list[Exchange]:
    """Measures what the constants of processors, and of links of these names, are made from."""
    made: list[Exchange] = []
    for ranks in CALIBRATION_RANKS:
        moved = [("move", 0, 200), ("move", 32 * KIB, 100), ("move", 32 * MIB // (ranks - 1), 5)]
        summed = [(kind, size, 100) for kind in ("sum", "reduce") for size in (32 * KIB, 256 * KIB)]
        made += exchanges(ranks, ranks, FAST, [*moved, *summed, ("reduce", MIB, 50)])
        made += exchanges(ranks, 1, FAST, summed)
    for name in slow_links(names):
        total = int(min(24 * MIB, _rate(name) / 8 * _SLOW_S))
        for ranks in CALIBRATION_RANKS:
            made += exchanges(ranks, ranks, name, [("move", total // (ranks - 1), 5)])
    return made


def slow_links(names: list[str]) -> list[str]:
    """Those that limit an exchange more than processors do, and one of them in any case."""
    return [name for name in links.RATES if (name in names and _rate(name) <= _rate(SLOW)) or name == SLOW]


def derive(machine: Machine, codec: CodecCost, made: list[Exchange]) -> Machine:
    """`machine` with the constants that the exchanges say; `codec` is what they were encoded with."""
    fast = [each for each in made if each.link == FAST]
    demands = np.array([each.demand(codec) for each in fast])
    times = np.array([each.processor_s - each.kernels_s(codec, machine) for each in fast])
    call_s, frame_s, local_frame_s, chunk_s, encoded_chunk_s, byte_s = fitted(demands, times)
    empty = [each for each in fast if each.ranks == 2 and not each.part_bytes]  # two ranks have a processor each
    latency_s = max(0.0, fmean(each.time_s - each.processor_s for each in empty))
    return replace(
        machine,
        call_s=call_s,
        frame_s=frame_s,
        local_frame_s=local_frame_s,
        chunk_s=chunk_s,
        encoded_chunk_s=encoded_chunk_s,
        socket_bytes_per_s=1 / byte_s,
        latency_s=latency_s,
        local_latency_s=latency_s,
    )


def derive_links(machine: Machine, made: list[Exchange], burst_bytes: dict[str, float]) -> dict[str, Link]:
    """Each kind of link; those that no exchange was limited by are taken to be as `SLOW` is."""
    measured = set(slow_links([each.link for each in made]))
    return {
        name: Link(burst, *link_constants(machine, [each for each in made if each.link == source], burst_bytes[source]))
        for name, burst in burst_bytes.items()
        for source in [name if name in measured else SLOW]
    }


def link_constants(machine: Machine, slow: list[Exchange], burst_bytes: float) -> tuple[float, float]:
    """Efficiency and incast: how much longer the link was busy than at its rate, once what the processors add is taken off."""
    excess: dict[int, list[float]] = {}
    for each in slow:
        busy_s = each.ranks * each.processor_s / machine.cores
        wire_bytes = (each.ranks - 1) * each.part_bytes * machine.wire_factor
        ideal_s = (wire_bytes - burst_bytes) * 8 / _rate(each.link)
        excess.setdefault(each.ranks, []).append(math.sqrt(max(ideal_s**2, each.time_s**2 - busy_s**2)) / ideal_s)
    alone, *crowds = (fmean(ratios) for ratios in excess.values())
    growth = [(ratio / alone - 1) / doublings(ranks - 1) for ranks, ratio in zip(CALIBRATION_RANKS[1:], crowds, strict=True)]
    if fmean(growth) < 0:  # two hosts alone do worst: the model has no term for that, so all get the mean
        return 1 / fmean([alone, *crowds]), 0.0
    return 1 / alone, fmean(growth)


def _rate(name: str) -> float:
    return links.RATES[name] or math.inf


def fitted(demands: np.ndarray, times: np.ndarray) -> list[float]:
    """Costs of each kind of demand that fit the times best, by the squares of relative errors; none costs less than nothing."""
    scaled = demands / times[:, None]
    kept = list(range(demands.shape[1]))
    while True:
        found = np.linalg.lstsq(scaled[:, kept], np.ones(len(times)), rcond=None)[0]
        if (found >= 0).all():
            break
        del kept[int(found.argmin())]
    costs = np.zeros(demands.shape[1])
    costs[kept] = found
    return [float(cost) for cost in costs]
