"""How long an all-reduce takes by each algorithm, and which one to use.

Each algorithm is a `_Demand`: what it asks of the busiest host. One formula turns that into time:

    time = hops + exposed + sqrt(link^2 + (processors - exposed)^2)

Hops are the frames that wait for each other, each at the cost of a latency. Chunks flow through a pipeline whose slower stage, the link or
the processors, sets the pace, and where both are nearly as slow they also wait for each other; what the first chunk needs before it can
leave and the last one after it came is exposed. Processors are shared by the ranks of a host. docs/cost-model.md derives every term.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from squinchcomm.collectives.exchange import runs_direct
from squinchcomm.collectives.plan import MAX_CHUNK_BYTES, Plan
from squinchcomm.errors import ConfigError
from squinchcomm.machine import CodecCost, Machine

DIRECT, PAIRWISE, HIERARCHICAL, RING = "direct", "pairwise", "hierarchical", "ring"
MAX_RANKS = 10_000_000
_FRAME_BYTES = 96  # header of a frame, the transport's prefix, framing


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks there are, and where.

    Attributes:
        ranks: In all.
        hosts: That they run on.
        most: Ranks on the fullest host.
        least: Ranks on the emptiest host.
    """

    ranks: int
    hosts: int
    most: int
    least: int

    @classmethod
    def even(cls, ranks: int, hosts: int) -> Self:
        """`ranks` spread over `hosts` as evenly as can be.

        Raises:
            ConfigError: no ranks or hosts, too many ranks, or more hosts than ranks.
        """
        if not 1 <= ranks <= MAX_RANKS:
            raise ConfigError(f"{ranks} ranks: give 1 to {MAX_RANKS}")
        if not 1 <= hosts <= ranks:
            raise ConfigError(f"{hosts} hosts for {ranks} ranks: give at least 1 host, and at most one for each rank")
        return cls(ranks, hosts, -(-ranks // hosts), ranks // hosts)

    @classmethod
    def of(cls, identities: Sequence[str]) -> Self:
        """The layout of a communicator, from the host identity of each rank."""
        sizes = Counter(identities).values()
        return cls(len(identities), len(sizes), max(sizes), min(sizes))

    @property
    def layered(self) -> bool:
        """Whether there are several hosts, and one with several ranks."""
        return 1 < self.hosts < self.ranks


@dataclass(frozen=True, slots=True)
class Prediction:
    """An all-reduce as the model sees it. Times in seconds, bytes and frames of the busiest host.

    Attributes:
        algorithm: Its name.
        time_s: From the moment at which all ranks call to the return of the last one.
        latency_s: Frames on their way with nothing else to do.
        exposed_s: Work on the first and the last chunk, during which the link idles.
        link_s: The link busy.
        processor_s: The processors busy.
        wire_bytes: Sent through the host's link, headers of all layers included.
        frames: Sent by the ranks of the host.
    """

    algorithm: str
    time_s: float
    latency_s: float
    exposed_s: float
    link_s: float
    processor_s: float
    wire_bytes: float
    frames: float

    @property
    def bound(self) -> str:
        """What takes longest: "link", "processors" or "latency"."""
        parts = {"link": self.link_s, "processors": self.processor_s, "latency": self.latency_s}
        return max(parts, key=parts.__getitem__)


@dataclass(slots=True, kw_only=True)
class _Demand:
    """What an all-reduce asks. Of the host: all its ranks together; of a rank: the busiest one. Processor time in seconds of one core."""

    hops: int = 0  # between hosts
    local_hops: int = 0
    wakes: int = 0  # of a rank
    payload: float = 0.0  # bytes that leave the host
    rank_payload: float = 0.0
    senders: int = 1  # hosts that send to a host at the same time
    frames: float = 0.0
    far_frames: float = 0.0  # of them, those that leave the host
    rank_frames: float = 0.0
    frame_s: float = 0.0  # each of them, with what is done to make it and to use it, its elements apart
    codec_s: float = 0.0
    rank_codec_s: float = 0.0
    copied: float = 0.0  # bytes, of the host
    streamed: float = 0.0  # bytes that kernels read and write once, of the host
    exposed_s: float = 0.0  # of the rank


@dataclass(frozen=True, slots=True)
class _Array:
    """The array: its elements, their bytes, and what the codec makes of them."""

    count: int
    itemsize: int
    codec: CodecCost

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize

    @property
    def wire(self) -> float:
        """Bytes on the wire for a byte of the array."""
        return 1.0 if self.codec.lossless else self.codec.bits / 8 / self.itemsize

    def cut(self, shards: int, most: int = 0) -> tuple[int, int, float]:
        """Shards that are not empty, chunks of each, and the bytes of a chunk."""
        tiles = -(-self.count // self.codec.tile)
        size = min(self.count, -(-tiles // shards) * self.codec.tile)
        plan = Plan([0, size], self.itemsize, self.codec.tile, most=most)
        chunks = max(1, plan.chunks(0))
        return min(shards, max(1, tiles)), chunks, min(size, plan.chunk) * self.itemsize

    def chunk_s(self, machine: Machine) -> float:
        """To put a contribution into a frame and to sum it there, its elements apart."""
        return machine.chunk_s if self.codec.lossless else machine.encoded_chunk_s

    def encode_s(self, nbytes: float) -> float:
        return 0.0 if self.codec.lossless else nbytes * 4 / self.itemsize / self.codec.encode_bytes_per_s

    def decode_s(self, nbytes: float) -> float:
        return 0.0 if self.codec.lossless else nbytes * 4 / self.itemsize / self.codec.decode_bytes_per_s

    def reduce_s(self, nbytes: float, machine: Machine) -> float:
        """To add inputs as they come from the wire, `nbytes` in all when decoded."""
        if self.codec.lossless:
            return nbytes / machine.add_bytes_per_s
        return nbytes * 4 / self.itemsize / self.codec.reduce_bytes_per_s


def _direct(layout: Layout, array: _Array, machine: Machine) -> _Demand:
    """Everybody sends its array to everybody: one hop, n - 1 times the bytes."""
    others = layout.ranks - 1
    far = layout.ranks - layout.most
    sum_s = layout.ranks * array.nbytes / machine.add_bytes_per_s
    frame_s = _to_everybody_s(layout, machine)
    return _Demand(
        hops=1 if layout.hosts > 1 else 0,
        local_hops=1 if layout.hosts == 1 else 0,
        wakes=1,
        payload=layout.most * far * array.nbytes,
        rank_payload=far * array.nbytes,
        senders=layout.hosts - 1,
        frames=layout.most * others,
        far_frames=layout.most * far,
        rank_frames=others,
        frame_s=frame_s,
        codec_s=layout.most * sum_s,
        rank_codec_s=sum_s,
        exposed_s=(1 + others / 2) * frame_s + sum_s,
    )


def _pairwise(layout: Layout, array: _Array, machine: Machine) -> _Demand:
    """Each rank sums a shard, whose parts come from everybody and whose sum goes to everybody: two hops, 2 (n-1)/n of the bytes."""
    n, size = layout.ranks, array.nbytes
    shards, chunks, chunk = array.cut(n)
    frames = (shards - 1 + n - 1) * chunks
    # A contribution is made for its receiver and summed; a sum is made once for all and only read.
    contributions = (shards - 1) / (shards - 1 + n - 1)
    frame_s = _to_everybody_s(layout, machine) + contributions * array.chunk_s(machine)
    far = (n - layout.most) / n
    near = (layout.most - 1) / n
    work_s = array.encode_s(size) + array.reduce_s(size, machine) + array.decode_s(size)
    # Lossless parts are copied out of their frames, and before that to where ranks of the host can read them.
    copied = size * ((n - 1) / n + 2 * near) if array.codec.lossless else 0.0
    last_s = array.reduce_s(n * chunk, machine) + array.encode_s(2 * chunk) + array.decode_s((shards - 1) * chunk)
    return _Demand(
        hops=2 if layout.hosts > 1 else 0,
        local_hops=2 if layout.hosts == 1 else 0,
        wakes=2,
        payload=layout.most * 2 * far * array.wire * size,
        rank_payload=2 * far * array.wire * size,
        senders=layout.hosts - 1,
        frames=layout.most * frames,
        far_frames=layout.most * frames * far * n / max(1, n - 1),
        rank_frames=frames,
        frame_s=frame_s,
        codec_s=layout.most * work_s,
        rank_codec_s=work_s,
        copied=layout.most * copied,
        streamed=layout.most * size,
        exposed_s=last_s + _exposed_frames(n - 1, chunks) * frame_s,
    )


def _hierarchical(layout: Layout, array: _Array, machine: Machine) -> _Demand:
    """A host's ranks hand their parts to combiners, which exchange the sums of hosts: 2 (H-1)/H of the bytes a host."""
    hosts, most, lanes, size = layout.hosts, layout.most, layout.least, array.nbytes
    shards, chunks, chunk = array.cut(lanes * hosts, MAX_CHUNK_BYTES)
    remote = (hosts - 1) / hosts
    far_frames = 2 * shards / hosts * (hosts - 1) * chunks
    near_frames = 2 * shards * chunks * (most - 1)
    # Half of the frames carry contributions, which inside a host travel as they are.
    frames_s = far_frames * (machine.frame_s + array.chunk_s(machine) / 2)
    frames_s += near_frames * (machine.local_frame_s + machine.chunk_s / 2)
    frame_s = frames_s / (far_frames + near_frames)
    # Combiners add what their host's ranks hand them, exact; homes add the sums of other hosts too.
    sums_s = most * size / machine.add_bytes_per_s + array.reduce_s(remote * size, machine) + array.encode_s(size)
    decode_s = array.decode_s(size)
    copied = (most - 1) * size + remote * array.wire * size + (most * size if array.codec.lossless else 0.0)
    first_s = most * chunk / machine.add_bytes_per_s + array.encode_s(chunk)
    last_s = first_s + array.reduce_s((hosts - 1) * chunk, machine) + array.decode_s((hosts - 1) * chunk)
    return _Demand(
        hops=2,
        local_hops=2,
        wakes=4,
        payload=2 * remote * array.wire * size,
        rank_payload=2 * remote * array.wire * size / lanes,
        senders=hosts - 1,
        frames=far_frames + near_frames,
        far_frames=far_frames,
        rank_frames=(far_frames + near_frames) / lanes,
        frame_s=frame_s,
        codec_s=sums_s + most * decode_s,
        rank_codec_s=sums_s / lanes + decode_s,
        copied=copied,
        streamed=most * size,
        exposed_s=first_s + last_s + _exposed_frames(hosts + most - 2, chunks) * frame_s,
    )


def _ring(layout: Layout, array: _Array, machine: Machine) -> _Demand:
    """The lossless ring of gloo and NCCL, 2 (n-1) hops (Patarasuk and Yuan, 2009): free frames, so a bound on what they can do."""
    n, size = layout.ranks, array.nbytes
    sent = 2 * (n - 1) / n * size
    sum_s = (n - 1) / n * size / machine.add_bytes_per_s
    return _Demand(
        hops=2 * (n - 1) if layout.hosts > 1 else 0,
        local_hops=2 * (n - 1) if layout.hosts == 1 else 0,
        payload=sent if layout.hosts > 1 else 0.0,
        rank_payload=sent if layout.hosts > 1 else 0.0,
        codec_s=layout.most * sum_s,
        rank_codec_s=sum_s,
        copied=(layout.most - 1) * sent,
        streamed=layout.most * size,
    )


def _to_everybody_s(layout: Layout, machine: Machine) -> float:
    """A frame of those that a rank of the fullest host sends to each of the others, their mean."""
    near, far = layout.most - 1, layout.ranks - layout.most
    return (near * machine.local_frame_s + far * machine.frame_s) / (near + far)


def _exposed_frames(peers: int, chunks: int) -> float:
    """Frames that no transfer hides: the first one, and those that arrive together at the end; twice if the halves do not overlap."""
    return (2 if chunks == 1 else 1) * (1 + peers / 2)


def doublings(count: int) -> float:
    """How often one doubles to become `count`, linear between powers of two: a logarithm that is the same on every machine."""
    power = max(1, count).bit_length() - 1
    return power + max(1, count) / (1 << power) - 1


_DEMANDS = {DIRECT: _direct, PAIRWISE: _pairwise, HIERARCHICAL: _hierarchical, RING: _ring}


def algorithms(layout: Layout, nbytes: int, codec: CodecCost, *, half: bool = False) -> tuple[str, ...]:
    """Those that can run such an all-reduce, the simplest first; none for a rank that is alone.

    Args:
        layout: Ranks and hosts.
        nbytes: Of the whole uncompressed array.
        codec: Its cost.
        half: Elements are floats of two bytes: without a codec, sums of hosts would be rounded before they are added, so that there is no
            hierarchical sum.
    """
    if layout.ranks == 1:
        return ()
    names = [PAIRWISE]
    if runs_direct(codec.lossless, nbytes, layout.ranks):
        names.insert(0, DIRECT)
    if layout.layered and not (half and codec.lossless):
        names.append(HIERARCHICAL)
    return tuple(names)


def predict(
    algorithm: str, layout: Layout, nbytes: int, codec: CodecCost, machine: Machine, *, itemsize: int = 4
) -> Prediction:
    """The time of one all-reduce.

    Args:
        algorithm: `DIRECT`, `PAIRWISE`, `HIERARCHICAL`, or, for comparison, `RING`, which ignores the codec.
        layout: Ranks and hosts.
        nbytes: Of the whole uncompressed array.
        codec: Its cost.
        machine: Constants of a host and its link.
        itemsize: Bytes of an element.
    """
    if layout.ranks == 1:
        return Prediction(algorithm, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    demand = _DEMANDS[algorithm](layout, _Array(-(-nbytes // itemsize), itemsize, codec), machine)
    threads = max(1, int(machine.cores // layout.most))
    wire_bytes = demand.payload * machine.wire_factor + demand.far_frames * _FRAME_BYTES
    link_s = max(0.0, wire_bytes - machine.link_burst_bytes) * 8 / machine.link_bits_per_s
    link_s *= (1 + machine.incast * doublings(demand.senders)) / machine.link_efficiency
    call_s = machine.call_s * demand.wakes
    host_s = (
        layout.most * call_s + demand.frames * demand.frame_s + demand.codec_s + demand.payload / machine.socket_bytes_per_s
    )
    # A rank has one thread that makes and reads frames, and one that moves bytes; its codec may have more.
    rank_s = max(
        call_s + demand.rank_frames * demand.frame_s + demand.rank_codec_s / threads,
        demand.rank_payload / machine.socket_bytes_per_s,
    )
    # However fast the kernels are on one processor, all of them together read and write one memory.
    kernels_s = max(host_s / machine.cores, rank_s, demand.streamed / machine.memory_bytes_per_s)
    processor_s = kernels_s + demand.copied / machine.memory_bytes_per_s
    # While one rank of a host works on what nothing hides, another one's bytes are on the link. Hosts that share a core wait in turn, as
    # far as it is the processors that are busy.
    pace_s = math.sqrt(link_s * link_s + processor_s * processor_s)
    busy = processor_s / pace_s if pace_s else 0.0
    turns = 1 + (1 / min(1.0, machine.cores) - 1) * busy
    exposed_s = min(processor_s, (call_s + demand.exposed_s) * turns)
    latency_s = demand.hops * machine.latency_s + demand.local_hops * machine.local_latency_s
    # Buffers between link and processors are finite: where both are busy, each now and then waits for the other.
    hidden_s = processor_s - exposed_s
    time_s = latency_s + exposed_s + math.sqrt(link_s * link_s + hidden_s * hidden_s)
    return Prediction(algorithm, time_s, latency_s, exposed_s, link_s, processor_s, wire_bytes, demand.frames)


@lru_cache(maxsize=4096)
def choose(
    layout: Layout,
    nbytes: int,
    codec: CodecCost,
    machine: Machine,
    *,
    itemsize: int = 4,
    half: bool = False,
    setting: str = "auto",
    direct: bool = True,
) -> Prediction:
    """How a communicator does an all-reduce: direct wherever that can run, else the faster of pairwise and hierarchical, by the model.

    Pairwise of equals. `half` is as in `algorithms`; `setting` is `Config.algorithm`, which may exclude one of the two; without
    `direct` the call is one that never is, a reduce-scatter.

    All ranks of a communicator must choose alike, so every argument must be the same on all of them, to the last bit: the layout is,
    when it comes from the transport's host identities; size, codec and type are, since the call's signature is checked; a measured
    machine or codec is not, until one rank's has been sent to all. The arithmetic is addition, multiplication,
    division and square root of IEEE doubles in a fixed order: equal arguments give equal choices on every machine.

    Takes well below 5 us for arguments seen before.

    Raises:
        ConfigError: one rank has nobody to reduce with.
    """
    able = algorithms(layout, nbytes, codec, half=half)
    if not able:
        raise ConfigError("an all-reduce of one rank has no algorithm: there is nothing to choose")
    names = [PAIRWISE]
    if direct and DIRECT in able:
        names = [DIRECT]
    elif HIERARCHICAL in able and setting != "flat":
        names = [HIERARCHICAL] if setting == "hierarchical" else [PAIRWISE, HIERARCHICAL]
    found = [predict(name, layout, nbytes, codec, machine, itemsize=itemsize) for name in names]
    return min(found, key=lambda each: each.time_s)
