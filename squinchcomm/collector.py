"""What this process's communicators have counted, as families of Prometheus metrics. Names and rules: docs/observability.md."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from squinchcomm import roster
from squinchcomm.collectives import wire
from squinchcomm.collectives.channel import codec_name
from squinchcomm.errors import ConfigError
from squinchcomm.kernels import codec_names, get_codec
from squinchcomm.stats import DURATION_BOUNDS_S, FAILURE_REASONS, Durations, Stats, Tally

PREFIX = "squinchcomm_"
MESSAGES = "send"  # the operation under which point-to-point traffic of both directions is counted
OPS = wire.OPS  # MESSAGES is the last of them

# Reasons of the policy and of torch's guards, by the words that metrics use for them.
_UNCOMPRESSED = {
    "small": "small",
    "dtype": "dtype",
    "op": "op",
    "off": "lossless",
    "guard": "lossless",
    "explicit": "not_gradient",
    "crossover": "crossover",
}
_SEQUENCED = tuple(op for op in OPS if op != MESSAGES)
_COMPRESSIBLE = ("allreduce", "reduce_scatter")
_USUAL_CODEC = "squinch6"

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class SquinchCollector(Collector):
    """Reads the counters when it is asked, and at no other time: the calls themselves pay nothing for metrics."""

    def describe(self) -> Iterator[Family]:
        """All families; a registry asks for them without wanting values."""
        return self.collect()

    def collect(self) -> Iterator[Family]:
        """All families with their values of now."""
        stats = roster.totals()
        yield from _traffic(_tallies(stats))
        yield _durations(stats)
        yield from _failures(stats)
        yield from _numerics(stats)
        yield from _state(stats)


def _tallies(stats: Stats) -> dict[tuple[str, str], Tally]:
    """Counts by operation and name of codec, in which what is usual exists from the beginning."""
    configured = sorted(name for name in roster.codecs() if not _is_lossless(name)) or [_USUAL_CODEC]
    tallies = {(op, "none"): Tally() for op in OPS}
    tallies |= {(op, codec): Tally() for codec in configured for op in _COMPRESSIBLE}
    for (op, codec_id), tally in list(stats.tallies.items()):
        tallies[op, codec_name(codec_id)] = tally
    tallies[MESSAGES, "none"] = stats.messages
    return tallies


def _is_lossless(name: str) -> bool:
    try:
        return get_codec(name).lossless
    except ConfigError:
        return True  # nobody has such a codec: calls that want it fail


def _traffic(tallies: dict[tuple[str, str], Tally]) -> Iterator[Family]:
    by_call = {
        "collectives": "Collectives that finished; under the op send, messages sent or received.",
        "raw_bytes": "Bytes that the payloads sent would have had without a codec.",
        "sent_wire_bytes": "Bytes handed to the transport, payloads and headers.",
        "received_wire_bytes": "Bytes taken from the transport, payloads and headers.",
    }
    families = [_counter(name, text, ["op", "codec"]) for name, text in by_call.items()]
    for labels, tally in tallies.items():
        values = tally.calls, tally.raw_bytes, tally.sent_bytes, tally.received_bytes
        for family, value in zip(families, values, strict=True):
            family.add_metric(labels, value)
    encode = _counter("encode_seconds", "Seconds spent on contributions: encoding, or reading them from the array.", ["codec"])
    decode = _counter("decode_seconds", "Seconds spent on arrivals: decoding, reducing, encoding sums, copying.", ["codec"])
    for codec in dict.fromkeys(codec for _, codec in tallies):
        of_codec = [tally for (_, name), tally in tallies.items() if name == codec]
        encode.add_metric([codec], sum(tally.encode_s for tally in of_codec))
        decode.add_metric([codec], sum(tally.decode_s for tally in of_codec))
    wait = _counter("wait_seconds", "Seconds in which a collective waited for frames and had nothing else to do.")
    wait.add_metric([], sum(tally.wait_s for tally in tallies.values()))
    yield from (*families, encode, decode, wait)


def _durations(stats: Stats) -> Family:
    family = HistogramMetricFamily(
        PREFIX + "collective_duration_seconds",
        "How long collectives took that finished, from their turn to their end.",
        labels=["op"],
    )
    for op in _SEQUENCED:
        durations = stats.durations.get(op) or Durations()
        counts = list(durations.counts)
        bounds = [*map(floatToGoString, DURATION_BOUNDS_S), "+Inf"]
        buckets = [(bound, float(sum(counts[: place + 1]))) for place, bound in enumerate(bounds)]
        family.add_metric([op], buckets=buckets, sum_value=durations.sum_s)
    return family


def _failures(stats: Stats) -> Iterator[Family]:
    failed = _counter(
        "collective_failures", "Collectives and messages that failed, calls after a failure included.", ["op", "reason"]
    )
    for op in OPS:
        for reason in FAILURE_REASONS:
            failed.add_metric([op, reason], stats.failed[op, reason])
    yield failed
    for name, text, value in (
        ("frames_corrupt", "Frames refused for their checksum or header.", stats.frames_corrupt),
        ("peer_failures", "Ranks whose loss made a call fail.", stats.peer_failures),
        ("aborts", "Communicators aborted by this rank while nothing had failed yet.", stats.aborts),
        ("shrinks", "Smaller communicators made after a failure.", stats.shrinks),
        ("rejected_peers", "Connections refused before a frame of theirs was read.", stats.rejected_peers),
        (
            "unshared_payloads",
            "Payloads to ranks of this host that went through sockets for want of memory.",
            stats.unshared_payloads,
        ),
    ):
        family = _counter(name, text)
        family.add_metric([], value)
        yield family


def _numerics(stats: Stats) -> Iterator[Family]:
    uncompressed = _counter("uncompressed", "Calls that a codec was set for and that went lossless.", ["reason"])
    reasons = dict.fromkeys(_UNCOMPRESSED.values(), 0)
    for reason, count in list(stats.uncompressed.items()):
        name = _UNCOMPRESSED.get(reason, reason)
        reasons[name] = reasons.get(name, 0) + count
    for reason, count in reasons.items():
        uncompressed.add_metric([reason], count)
    yield uncompressed
    for name, text, value in (
        ("nonfinite_blocks", "Blocks encoded that held a NaN or infinity: all of them, not a sample.", _nonfinite_blocks()),
        (
            "sampled_blocks",
            "Blocks whose scale was looked at: a part of one chunk in 1 of 50 compressed calls.",
            stats.sampled_blocks,
        ),
        ("saturated_blocks", "Of the sampled blocks, those with the codec's largest scale.", stats.saturated_blocks),
        (
            "underflow_blocks",
            "Of the sampled blocks, those with its smallest, whose values may have become 0.",
            stats.underflow_blocks,
        ),
    ):
        family = _counter(name, text)
        family.add_metric([], value)
        yield family
    error = _gauge(
        "quantization_error_ratio", "Length of what encoding lost over length of what was encoded, latest sample.", ["codec"]
    )
    for codec, ratio in sorted(stats.error_ratios.items()):
        error.add_metric([codec], ratio)
    yield error
    norm = _gauge("residual_norm", "Euclidean length of the residuals of error feedback on this rank.", ["codec"])
    squares: dict[str, float] = {}
    for holder, codec in roster.residual_holders():
        squares[codec] = squares.get(codec, 0.0) + holder.residual_norm() ** 2
    for codec, square in squares.items():
        norm.add_metric([codec], square**0.5)
    yield norm


def _state(stats: Stats) -> Iterator[Family]:
    in_flight = sum(member.in_flight for member in roster.live())
    for name, text, value in (
        ("peers", "Other ranks of the job that are not lost.", roster.connected_peers()),
        ("inflight_collectives", "Collectives that are queued or running.", in_flight),
        ("last_collective_timestamp_seconds", "When the latest collective finished; 0 before.", stats.last_end_s),
    ):
        gauge = _gauge(name, text)
        gauge.add_metric([], value)
        yield gauge
    build = _gauge("build_info", "Versions; the value is 1.", ["version", "wire_version", "python"])
    build.add_metric([version("squinchcomm"), str(wire.WIRE_VERSION), platform.python_version()], 1)
    yield build
    rank = _gauge(
        "rank_info",
        "Who this process is; the value is 1.",
        ["rank", "local_rank", "world_size", "transport", "node", "encrypted"],
    )
    info = roster.rank_info()
    if info is not None:
        encrypted = "true" if info.encrypted else "false"
        rank.add_metric([str(info.rank), str(info.local_rank), str(info.world_size), info.transport, info.node, encrypted], 1)
    yield rank


def _nonfinite_blocks() -> int:
    return sum(getattr(get_codec(name), "nonfinite_blocks", 0) for name in codec_names())


def _counter(name: str, text: str, labels: list[str] | None = None) -> Any:
    return CounterMetricFamily(PREFIX + name, text, labels=labels or [])


def _gauge(name: str, text: str, labels: list[str] | None = None) -> Any:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels or [])
