"""What failed, who was lost, what was refused."""

from __future__ import annotations

from dashboards.panels import Panel, Query, Row, dashboard
from dashboards.queries import CHOSEN, by_rank, increase, rate, series, total

_RANK = "rank {{rank}} {{instance}}"
_OF_RANK = "job, instance"

_NOW = Row(
    8,
    (
        Panel(
            "Firing alerts",
            "Alerts of dashboards/alerts.yml that fire now or did within the shown time; docs/runbooks.md says what to do about each.",
            "short",
            (
                Query(
                    'sum by (alertname, severity) (ALERTS{alertname=~"Squinchcomm.*", alertstate="firing", job=~"$job"})',
                    "{{alertname}} ({{severity}})",
                ),
            ),
        ),
        Panel(
            "Targets that do not answer",
            "Ranks on Prometheus' list whose metrics cannot be read: ended, or out of reach.",
            "short",
            (Query(f"sum by (job) (up{{{CHOSEN}}} == bool 0)", "{{job}}"),),
        ),
    ),
)

_FAILURES = Row(
    9,
    (
        Panel(
            "Failed calls by reason",
            "Within the last few scrapes, over all ranks. timeout: a peer did not come. peer_lost: a process or host died. mismatch: "
            "ranks made different calls. corrupt: a frame was damaged. aborted: somebody gave up.",
            "short",
            (Query(increase("collective_failures_total", by="reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Failed calls by operation",
            "Within the last few scrapes, over all ranks.",
            "short",
            (Query(f"{increase('collective_failures_total', by='op')} > 0", "{{op}}"),),
            stacked=True,
        ),
        Panel(
            "Failed calls by rank",
            "Within the last few scrapes. Most failures are told to all ranks: the log of the first one has the cause.",
            "short",
            (Query(by_rank(increase("collective_failures_total", by=_OF_RANK)), _RANK),),
        ),
    ),
)

_EVENTS = Row(
    9,
    (
        Panel(
            "Lost peers, aborts, shrinks",
            "Within the last few scrapes, summed over ranks: one dead rank of 8 is lost 7 times.",
            "short",
            (
                Query(increase("peer_failures_total"), "lost peers"),
                Query(increase("aborts_total"), "aborts"),
                Query(increase("shrinks_total"), "shrinks"),
            ),
        ),
        Panel(
            "Corrupt frames",
            "Frames that a checksum or a header gave away, within the last few scrapes. Any at all is a fault of memory, network "
            "card or driver, or somebody who tampers.",
            "short",
            (Query(by_rank(increase("frames_corrupt_total", by=_OF_RANK)), _RANK),),
        ),
        Panel(
            "Refused connections",
            "Connections that did not know the job's key or did not belong to it, within the last few scrapes.",
            "short",
            (Query(by_rank(increase("rejected_peers_total", by=_OF_RANK)), _RANK),),
        ),
    ),
)

_PROGRESS = Row(
    8,
    (
        Panel(
            "Finished calls",
            "Collectives a second, over all ranks. It falls to 0 where a job hangs, ends or only computes.",
            "ops",
            (Query(rate("collectives_total", by="job"), "{{job}}"),),
        ),
        Panel(
            "Calls in flight and not finished",
            "Collectives called and not finished, by rank. Above 0 without an end: the peers of that rank did not come.",
            "short",
            (Query(by_rank(series("inflight_collectives")), _RANK),),
        ),
        Panel(
            "Peers by rank",
            "Other ranks that each one is connected with.",
            "short",
            (Query(by_rank(total(series("peers"), _OF_RANK)), _RANK),),
        ),
    ),
)

FAULTS = dashboard("Faults", "Failures by reason, lost peers, what was refused.", (_NOW, _FAILURES, _EVENTS, _PROGRESS))
