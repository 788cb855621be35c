"""Counters of one communicator, kept in plain numbers so that counting costs nothing. `squinchcomm.metrics` reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from squinchcomm.errors import (
    CollectiveTimeout,
    CommunicatorAborted,
    MismatchError,
    PeerLost,
    WireFormatError,
)

# Upper bounds of the classes of durations, seconds: two or three a decade where most calls are.
DURATION_BOUNDS_S = (1e-4, 5e-4, 2e-3, 1e-2, 5e-2, 2e-1, 1.0, 10.0, 100.0)

_REASONS: dict[type[BaseException], str] = {
    CollectiveTimeout: "timeout",
    PeerLost: "peer_lost",
    CommunicatorAborted: "aborted",
    WireFormatError: "corrupt",
    MismatchError: "mismatch",
}
FAILURE_REASONS = tuple(_REASONS.values())


def failure_reason(error: BaseException) -> str:
    """One of `FAILURE_REASONS`; what is no error of ours (an interrupt, a fault in a callback) breaks a call off: "aborted"."""
    return next((reason for kind, reason in _REASONS.items() if isinstance(error, kind)), "aborted")


_SUMS = (
    "frames_corrupt",
    "peer_failures",
    "aborts",
    "shrinks",
    "rejected_peers",
    "unshared_payloads",
    "sampled_blocks",
    "saturated_blocks",
    "underflow_blocks",
)


@dataclass(slots=True)
class Meter:
    """What one call, or many, cost.

    Attributes:
        sent_bytes: Payload and header bytes handed to the transport.
        received_bytes: Payload and header bytes taken from it.
        raw_bytes: What the sent payloads would have been without a codec.
        encode_s: Seconds spent on contributions: encoding them, or reading them from the array.
        decode_s: Seconds spent on arrivals: decoding, reducing, encoding the reduced, or copying.
        wait_s: Seconds waiting for frames.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    raw_bytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0

    def add(self, other: Meter) -> None:
        """Adds what another one counted."""
        self.sent_bytes += other.sent_bytes
        self.received_bytes += other.received_bytes
        self.raw_bytes += other.raw_bytes
        self.encode_s += other.encode_s
        self.decode_s += other.decode_s
        self.wait_s += other.wait_s


@dataclass(slots=True)
class Tally(Meter):
    """The sum over all calls of one operation with one codec; `calls` are those that finished."""

    calls: int = 0


@dataclass(slots=True)
class Durations:
    """How long calls took: how many lie in each class of `DURATION_BOUNDS_S` (one more for longer ones), and the sum in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(DURATION_BOUNDS_S) + 1))
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Counts one call."""
        self.counts[bisect_left(DURATION_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def add(self, other: Durations) -> None:
        """Adds what another one counted."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum_s += other.sum_s


@dataclass(slots=True, repr=False)
class Stats:
    """What a communicator has done so far; calls count when they end. Sums over all calls are properties.

    Attributes:
        tallies: Collectives by name of operation and wire id of codec. Bytes and seconds include calls that failed.
        durations: Of collectives that finished, by name.
        failed: Calls that failed, by name and reason (see `FAILURE_REASONS`).
        messages: Point-to-point traffic of both directions; `calls` are messages sent or received.
        uncompressed: Calls that asked for a codec but went lossless, by reason.
        frames_corrupt: Frames refused by checksum or header.
        peer_failures: Ranks whose loss made a call fail.
        aborts: 1 once `abort` was called on this rank while nothing had failed yet.
        shrinks: Smaller communicators made of this one.
        rejected_peers: Connections refused before a frame of theirs was read; filled in when the communicator is closed.
        unshared_payloads: Payloads to ranks of this host that went through sockets for want of memory; likewise.
        sampled_blocks: Blocks of encoded chunks that were looked at.
        saturated_blocks: Those of them whose scale is the codec's largest.
        underflow_blocks: Those of them whose scale is the codec's smallest: their values may have become 0.
        error_ratios: Latest sample of each codec, by name: length of what the encoding lost over length of what was encoded.
        error_ratio: The sample of the latest call that was looked at, until `take_error_ratio`.
        last_end_s: Time of day (Unix seconds) at which the latest collective finished; 0 before.
    """

    tallies: defaultdict[tuple[str, int], Tally] = field(default_factory=lambda: defaultdict(Tally))
    durations: defaultdict[str, Durations] = field(default_factory=lambda: defaultdict(Durations))
    failed: Counter[tuple[str, str]] = field(default_factory=Counter)
    messages: Tally = field(default_factory=Tally)
    uncompressed: Counter[str] = field(default_factory=Counter)
    frames_corrupt: int = 0
    peer_failures: int = 0
    aborts: int = 0
    shrinks: int = 0
    rejected_peers: int = 0
    unshared_payloads: int = 0
    sampled_blocks: int = 0
    saturated_blocks: int = 0
    underflow_blocks: int = 0
    error_ratios: dict[str, float] = field(default_factory=dict)
    error_ratio: float | None = None
    last_end_s: float = 0.0
    _lost: set[int] = field(default_factory=set)

    def __repr__(self) -> str:
        """In a line: calls, bytes, and why some went uncompressed; all else is in the attributes."""
        total = self.total()
        ratio = f" ({total.raw_bytes / total.sent_bytes:.2f}x)" if total.raw_bytes else ""
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.uncompressed.copy().items()))
        return (
            f"<Stats: {self.compressed} of {self.collectives} collectives compressed, {total.raw_bytes:,} raw bytes sent "
            f"as {total.sent_bytes:,} on the wire{ratio}; uncompressed: {reasons or 'none'}; failed: {self.failures}>"
        )

    def count(self, op: str, codec_id: int, meter: Meter, duration_s: float, ended_s: float) -> None:
        """Counts a collective that finished at `ended_s`, a time of day."""
        tally = self.tallies[op, codec_id]
        tally.calls += 1
        tally.add(meter)
        self.durations[op].observe(duration_s)
        self.last_end_s = ended_s

    def take_error_ratio(self) -> float | None:
        """The sample of what the encoding lost in the call that has just run, if it was looked at; once."""
        taken, self.error_ratio = self.error_ratio, None
        return taken

    def count_failure(self, op: str, error: BaseException) -> None:
        """Counts a call that failed."""
        self.failed[op, failure_reason(error)] += 1
        if isinstance(error, PeerLost) and error.peer is not None and error.peer not in self._lost:
            self._lost.add(error.peer)
            self.peer_failures += 1

    @property
    def collectives(self) -> int:
        """Calls that finished."""
        return sum(tally.calls for tally in list(self.tallies.values()))

    @property
    def failures(self) -> int:
        """Calls that failed."""
        return self.failed.total()

    @property
    def compressed(self) -> int:
        """Calls whose payload was encoded by a lossy codec."""
        return sum(tally.calls for (_, codec_id), tally in list(self.tallies.items()) if codec_id)

    @property
    def sent_wire_bytes(self) -> int:
        """Payload and header bytes handed to the transport, of collectives and messages alike."""
        return self.total().sent_bytes

    @property
    def received_wire_bytes(self) -> int:
        """Payload and header bytes taken from the transport."""
        return self.total().received_bytes

    def total(self) -> Meter:
        """Bytes and seconds of all calls, messages included."""
        total = Meter()
        for tally in (*list(self.tallies.values()), self.messages):
            total.add(tally)
        return total

    def add(self, other: Stats) -> None:
        """Adds what another communicator has counted; of its latest values, takes those that are newer."""
        for key, tally in list(other.tallies.items()):
            self.tallies[key].add(tally)
            self.tallies[key].calls += tally.calls
        for op, durations in list(other.durations.items()):
            self.durations[op].add(durations)
        self.messages.add(other.messages)
        self.messages.calls += other.messages.calls
        self.failed.update(other.failed.copy())
        self.uncompressed.update(other.uncompressed.copy())
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.last_end_s >= self.last_end_s:
            self.last_end_s = other.last_end_s
            self.error_ratios |= other.error_ratios
        else:
            self.error_ratios = other.error_ratios | self.error_ratios

    def clear(self) -> None:
        """Starts over at zero."""
        fresh = Stats()
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))
