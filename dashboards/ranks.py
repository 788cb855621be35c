"""Which rank is different: where each one's time goes, who waits for whom, who is who."""

from __future__ import annotations

from dashboards.panels import Panel, Query, Row, dashboard
from dashboards.queries import by_rank, rate, ratio, series

_RANK = "rank {{rank}} {{instance}}"
_OF_RANK = "job, instance"
_DURATION = "collective_duration_seconds"
_WAIT = rate("wait_seconds_total", by=_OF_RANK)

_WHO = Row(
    7,
    (
        Panel(
            "Who is who",
            "Rank, machine and transport behind each instance. `encrypted` says whether its frames to other machines are.",
            "none",
            (Query(series("rank_info"), ""),),
            kind="table",
        ),
    ),
)

_STRAGGLERS = Row(
    9,
    (
        Panel(
            "Waits less than the median rank",
            "Seconds in a second. The others wait for the rank on top: a slow machine, a slow link, more work than the others. "
            "All near 0: nobody is behind.",
            "percentunit",
            (Query(by_rank(f"clamp_min(quantile by (job) (0.5, {_WAIT}) - on (job) group_right {_WAIT}, 0)"), _RANK),),
        ),
        Panel(
            "Waiting",
            "Share of its time that each rank waits for frames of others. Equal and high: the network sets the pace. "
            "Unequal: whoever waits least keeps the others waiting.",
            "percentunit",
            (Query(by_rank(_WAIT), _RANK),),
        ),
    ),
)

_SPLIT = Row(
    9,
    (
        Panel(
            "Where the time of a collective goes",
            "Mean of all ranks, share of wall-clock time. Waiting on top: the link or a straggler. Encoding and decoding on top: "
            "the CPUs; more SQUINCH_CODEC_THREADS help where cores are idle.",
            "percentunit",
            (
                Query(f"avg({rate('encode_seconds_total', by=_OF_RANK)})", "encode"),
                Query(f"avg({rate('decode_seconds_total', by=_OF_RANK)})", "decode and add"),
                Query(f"avg({_WAIT})", "wait"),
            ),
            stacked=True,
        ),
        Panel(
            "Encoding",
            "Share of its time that each rank spends on contributions: encoding them, or reading them from the array.",
            "percentunit",
            (Query(by_rank(rate("encode_seconds_total", by=_OF_RANK)), _RANK),),
        ),
        Panel(
            "Decoding",
            "Share of its time that each rank spends on arrivals: decoding, adding, encoding sums, or copying.",
            "percentunit",
            (Query(by_rank(rate("decode_seconds_total", by=_OF_RANK)), _RANK),),
        ),
    ),
)

_TRAFFIC = Row(
    9,
    (
        Panel(
            "Sent",
            "Bytes a second, headers included. Ranks of a balanced job send the same.",
            "Bps",
            (Query(by_rank(rate("sent_wire_bytes_total", by=_OF_RANK)), _RANK),),
        ),
        Panel(
            "Received",
            "Bytes a second, headers included.",
            "Bps",
            (Query(by_rank(rate("received_wire_bytes_total", by=_OF_RANK)), _RANK),),
        ),
        Panel(
            "Mean duration of a collective",
            "From the start of a call to its result. A rank that comes late has the shortest calls.",
            "s",
            (
                Query(
                    by_rank(ratio(rate(f"{_DURATION}_sum", by=_OF_RANK), rate(f"{_DURATION}_count", by=_OF_RANK))),
                    _RANK,
                ),
            ),
        ),
    ),
)

_STATE = Row(
    8,
    (
        Panel(
            "Since the last collective",
            "Time since each rank finished one. A rank whose line climbs alone is stuck, or behind.",
            "s",
            (Query(by_rank(f"(time() - ({series('last_collective_timestamp_seconds')} > 0))"), _RANK),),
        ),
        Panel(
            "Calls in flight",
            "Collectives that were called and have not finished.",
            "short",
            (Query(by_rank(series("inflight_collectives")), _RANK),),
        ),
        Panel(
            "Peers",
            "Other ranks that each one is connected with. A rank with fewer than the others has lost somebody.",
            "short",
            (Query(by_rank(series("peers")), _RANK),),
        ),
    ),
)

RANKS = dashboard("Ranks", "Stragglers, and where each rank's time goes.", (_WHO, _STRAGGLERS, _SPLIT, _TRAFFIC, _STATE))
