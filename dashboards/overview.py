"""The dashboard to open first: is the job well, what does compression save, how fast is the network used."""

from __future__ import annotations

from dashboards.panels import Panel, Query, Row, dashboard
from dashboards.queries import LOSSY, by_rank, increase, quantile, rate, ratio, series

_DURATION = "collective_duration_seconds"

_HEALTH = Row(
    4,
    (
        Panel(
            "Ranks",
            "Ranks whose metrics arrive. Fewer than the job has: ended, not on Prometheus' list, or lost.",
            "short",
            (Query(f"count({series('build_info')})", "ranks"),),
            kind="stat",
        ),
        Panel(
            "Compression",
            "Raw bytes for each byte sent, of what a lossy codec encoded: 5.3 for float32 in 6 bits, 2.7 for bfloat16.",
            "none",
            (Query(ratio(rate("raw_bytes_total", LOSSY), rate("sent_wire_bytes_total", LOSSY)), "ratio"),),
            kind="stat",
        ),
        Panel(
            "Sent by all ranks",
            "Bytes a second that all ranks together hand to the transport, frame headers included.",
            "Bps",
            (Query(rate("sent_wire_bytes_total"), "sent"),),
            kind="stat",
        ),
        Panel(
            "Time spent waiting",
            "Share of their time that ranks wait for frames of others, on average. Near 100 %: the network sets the pace.",
            "percentunit",
            (Query(f"avg(rate({series('wait_seconds_total')}[$__rate_interval]))", "waiting"),),
            kind="stat",
        ),
        Panel(
            "Failed calls",
            "Collectives that ended with an error on some rank within the last few scrapes. See the dashboard Faults.",
            "short",
            (Query(increase("collective_failures_total"), "failed"),),
            kind="stat",
            bad_from=0.5,
        ),
        Panel(
            "Since the last collective",
            "Time since any rank finished a collective. Grows while a job computes, saves, or is stuck.",
            "s",
            (Query(f"time() - max({series('last_collective_timestamp_seconds')} > 0)", "idle"),),
            kind="stat",
            bad_from=300,
        ),
    ),
)

_BYTES = Row(
    8,
    (
        Panel(
            "Bytes on the wire against raw bytes",
            "What all ranks send, and what the same payloads would have been without a codec. The gap is what compression saves.",
            "Bps",
            (Query(rate("raw_bytes_total"), "raw"), Query(rate("sent_wire_bytes_total"), "on the wire")),
        ),
        Panel(
            "Compression by codec",
            "Raw bytes for each byte sent. Below a codec's own ratio, small payloads spend their bytes on headers.",
            "none",
            (Query(ratio(rate("raw_bytes_total", by="codec"), rate("sent_wire_bytes_total", by="codec")), "{{codec}}"),),
        ),
    ),
)

_SPEED = Row(
    8,
    (
        Panel(
            "Bus bandwidth by operation",
            "Raw bytes that a rank sends in a second of a running collective, on average: comparable with nccl-tests' busbw. "
            "May exceed the speed of the link, because fewer bytes travel.",
            "Bps",
            (Query(ratio(rate("raw_bytes_total", by="op"), rate(f"{_DURATION}_sum", by="op")), "{{op}}"),),
        ),
        Panel(
            "Link bandwidth by operation",
            "Bytes that a rank really sends in a second of a running collective. Compare with the speed of the link.",
            "Bps",
            (Query(ratio(rate("sent_wire_bytes_total", by="op"), rate(f"{_DURATION}_sum", by="op")), "{{op}}"),),
        ),
    ),
)

_TIMES = Row(
    8,
    (
        Panel(
            "Duration of a collective: median",
            "Half of the calls take less, from the start of the call to its result, waiting for late ranks included.",
            "s",
            (Query(quantile(0.5, _DURATION, "op"), "{{op}}"),),
        ),
        Panel(
            "Duration of a collective: 99th percentile",
            "One call in a hundred takes longer. Far above the median: stragglers, retries of the network, or mixed sizes.",
            "s",
            (Query(quantile(0.99, _DURATION, "op"), "{{op}}"),),
        ),
    ),
)

_CALLS = Row(
    8,
    (
        Panel(
            "Collectives",
            "Calls that finish in a second, over all ranks, by operation and codec.",
            "ops",
            (Query(f"{rate('collectives_total', by='op, codec')} > 0", "{{op}} {{codec}}"),),
        ),
        Panel(
            "Share of time in collectives",
            "Per rank. What is left is computation and input, unless calls overlap with it (async_op, DDP): then it counts twice.",
            "percentunit",
            (Query(by_rank(rate(f"{_DURATION}_sum", by="job, instance")), "rank {{rank}} {{instance}}"),),
        ),
    ),
)

OVERVIEW = dashboard(
    "Overview", "Health of a job, bytes saved, bandwidth, durations.", (_HEALTH, _BYTES, _SPEED, _TIMES, _CALLS)
)
