"""How panels ask for metrics: always those of the chosen jobs and instances, counters always as a rate."""

from __future__ import annotations

PREFIX = "squinchcomm_"
CHOSEN = 'job=~"$job", instance=~"$instance"'
LOSSY, LOSSLESS = 'codec!="none"', 'codec="none"'
WINDOW = "$__rate_interval"  # Grafana's: at least four scrapes


def series(metric: str, *matchers: str) -> str:
    """The chosen series of a metric, named without its prefix."""
    return f"{PREFIX}{metric}{{{', '.join((CHOSEN, *matchers))}}}"


def rate(metric: str, *matchers: str, by: str = "") -> str:
    """How fast a counter grows, a second, summed over all labels but `by`."""
    return total(f"rate({series(metric, *matchers)}[{WINDOW}])", by)


def increase(metric: str, *matchers: str, by: str = "") -> str:
    """By how much a counter has grown within the window, summed over all labels but `by`."""
    return total(f"increase({series(metric, *matchers)}[{WINDOW}])", by)


def total(expression: str, by: str = "") -> str:
    """The sum over all labels but `by`."""
    return f"sum by ({by}) ({expression})" if by else f"sum({expression})"


def quantile(share: float, metric: str, by: str) -> str:
    """A quantile of a histogram, for each value of `by` that has any observations."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', by=f'{by}, le')}) >= 0"


def ratio(part: str, whole: str) -> str:
    """Their quotient where there is a whole: labels of which nothing is counted are left out."""
    return f"{part} / ({whole} > 0)"


def by_rank(expression: str) -> str:
    """Adds the rank to what has the labels job and instance: metrics themselves do not carry it."""
    return f"{expression} * on (job, instance) group_left (rank) {series('rank_info')}"
