"""A report from what a Prometheus server has scraped of a job's ranks: finished or running, as far back as it remembers."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from squinchcomm.cli.prometheus_api import Series, Server, quoted
from squinchcomm.cli.report_model import Chart, HeatMap, Points, Report, Section, Table, by_rank, quantity
from squinchcomm.errors import ConfigError

_POINTS = 120
_MOST_INSTANCES_IN_TEXT = 64
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_FAULTS = {
    "frames_corrupt_total": "frames refused for their checksum or header",
    "peer_failures_total": "ranks lost",
    "aborts_total": "communicators aborted",
    "shrinks_total": "smaller communicators made after a failure",
    "rejected_peers_total": "connections refused",
    "nonfinite_blocks_total": "blocks with a NaN or infinity",
}


def report(url: str, job: str, last: str) -> Report:
    """The job's last `last`, such as "30m", up to now.

    Raises:
        ConfigError: `last` is no time, the server does not answer, or it has nothing of the job.
    """
    seconds = _parse_span(last)
    server, now = Server(url), time.time()
    # Series are looked up as they were sampled: a job that ended within the time is found as well.
    sampled = server.query(f"last_over_time(squinchcomm_rank_info{{job={quoted(job)}}}[{math.ceil(seconds)}s])")
    if not sampled:
        known = server.query("group by (job) (last_over_time(squinchcomm_rank_info[1d]))")
        others = ", ".join(sorted(each.metric.get("job", "?") for each in known))
        hint = (
            f"; of the last day it has {others} (--job)" if others else "; is SQUINCH_METRICS_PORT set, and are ranks scraped?"
        )
        raise ConfigError(f"--prometheus {url}: nothing of job {job!r} within the last {last}{hint}")
    chosen = f"job={quoted(job)}"
    start, end = _covered(server, chosen, now - seconds, now)
    window = _Window(server, chosen, start, end, _rate_window_s(server, chosen, start, end))
    section = window.section(job, sampled)
    notes = ["Prometheus knows sums, not single calls: recordings (SQUINCH_RECORDER_DIR) show those, and waits for each peer."]
    return Report(f"squinchcomm report: {job}", f"Prometheus at {url}, the last {last}", [section], notes)


def _parse_span(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if not 10 <= seconds <= 366 * 86400:
        raise ConfigError(f"--last {text}: give a time from 10s to 366d, such as 90s, 30m, 6h or 2d")
    return seconds


def _covered(server: Server, chosen: str, start: float, end: float) -> tuple[float, float]:
    """The part of the time in which there is something to see."""
    step_s = max((end - start) / 1000, 1.0)
    seen = [
        at for series in server.query_range(f"squinchcomm_rank_info{{{chosen}}}", start, end, step_s) for at, _ in series.points
    ]
    return (min(seen) - step_s, max(seen)) if seen else (start, end)


def _rate_window_s(server: Server, chosen: str, start: float, end: float) -> int:
    """Four scrapes, as dashboards take, whatever the server's period is, and two values of a line."""
    looked_s = math.ceil(min(600.0, end - start))
    counted = server.query_range(f"count_over_time(squinchcomm_peers{{{chosen}}}[{looked_s}s])", start, end, (end - start) / 10)
    most = max((value for series in counted for _, value in series.points), default=1.0)
    return math.ceil(max(4 * looked_s / most, 2 * (end - start) / _POINTS, 4.0))


@dataclass(frozen=True)
class _Window:
    """Queries over the time that the report covers."""

    server: Server
    chosen: str
    start: float
    end: float
    rate_window_s: int

    @property
    def step_s(self) -> float:
        """Between the values of a line."""
        return max((self.end - self.start) / _POINTS, 1.0)

    def _metric(self, name: str, matcher: str = "") -> str:
        return f"squinchcomm_{name}{{{self.chosen}{matcher}}}"

    def _rate(self, name: str, matcher: str = "") -> str:
        return f"rate({self._metric(name, matcher)}[{self.rate_window_s}s])"

    def _lines(self, expression: str) -> list[tuple[dict[str, str], Points]]:
        found = self.server.query_range(expression, self.start, self.end, self.step_s)
        kept = [(each.metric, [(at, value) for at, value in each.points if math.isfinite(value)]) for each in found]
        return [(labels, points) for labels, points in kept if points]

    def _total(self, name: str, by: str) -> dict[tuple[str, ...], float]:
        """By how much a counter grew, in sums by labels. Exact, unlike `increase`, and with what came before the first scrape."""
        names = by.split(", ")
        grown: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for labels, points in self._lines(f"sum by ({', '.join(dict.fromkeys((*names, 'instance')))}) ({self._metric(name)})"):
            key = tuple(labels.get(label, "") for label in names)
            first_at, first = points[0]
            grown[key] += first if first_at > self.start else 0.0
            grown[key] += sum(later - earlier if later >= earlier else later for (_, earlier), (_, later) in pairwise(points))
        return grown

    def section(self, job: str, sampled: list[Series]) -> Section:
        """All there is to see."""
        ranks = {each.metric.get("instance", "?"): each.metric for each in sampled}
        names = {instance: f"rank {labels.get('rank', '?')}" for instance, labels in _in_order(ranks)}
        some = next(iter(ranks.values()))
        facts = {
            "ranks": f"{len({labels.get('rank') for labels in ranks.values()})} of {some.get('world_size', '?')}",
            "transport": some.get("transport", "?"),
            "encrypted": some.get("encrypted", "?"),
            "begins": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.start)),
            "spans": quantity(self.end - self.start, "s"),
        }
        section = Section(f"Job {job}", facts)
        section.parts = [self._bandwidth(names), self._ratio(), self._error(), self._skew(), self._shares(), self._waits(names)]
        failures, counts = self._failures(names), self._operations()
        section.findings = [f"{row[0]}: {row[3]} x {row[1]} {row[2]}" for row in failures.rows]
        section.parts += [counts, failures, self._ranks(names, ranks), self._settings()]
        return section

    def _of_ranks(self, expression: str, names: dict[str, str]) -> dict[str, Points]:
        found = {labels.get("instance", "?"): points for labels, points in self._lines(expression)}
        return {name: found[instance] for instance, name in names.items() if instance in found}

    def _bandwidth(self, names: dict[str, str]) -> Chart:
        rates = self._of_ranks(f"sum by (instance) ({self._rate('sent_wire_bytes_total')})", names)
        return by_rank("Bandwidth", "B/s", "Sent over the wire by each rank, headers included.", rates)

    def _ratio(self) -> Chart:
        whole = f"sum({self._rate('raw_bytes_total')}) / (sum({self._rate('sent_wire_bytes_total')}) > 0)"
        lines = {"all ranks": [point for _, points in self._lines(whole) for point in points]}
        note = "Bytes that payloads would have had without a codec, over bytes sent; all ranks together."
        return Chart("Compression ratio", "", note, lines, level=(1.0, "no compression"))

    def _error(self) -> Chart:
        found = self._lines(f"quantile by (codec) (0.5, {self._metric('quantization_error_ratio')})")
        note = "Length of what encoding lost over length of what was encoded; median of the ranks' latest samples."
        return Chart("Quantisation error", "", note, {labels.get("codec", "?"): points for labels, points in found})

    def _skew(self) -> Chart:
        waits = self._rate("wait_seconds_total")
        apart = self._lines(f"100 * (max({waits}) - min({waits}))")
        lines = {"most - least": [point for _, points in apart for point in points]}
        return Chart(
            "Skew", "%", "Share of time that the rank which waits most waits more than the one which waits least.", lines
        )

    def _shares(self) -> Chart:
        lines = {}
        for name in ("wait", "encode", "decode"):
            for _, points in self._lines(f"100 * avg(sum by (instance) ({self._rate(f'{name}_seconds_total')}))"):
                lines[name] = points
        note = "Share of all time, mean of the ranks; encoding and decoding of several threads add up."
        return Chart("Waiting, encoding, decoding", "%", note, lines)

    def _waits(self, names: dict[str, str]) -> HeatMap:
        rows = self._of_ranks(f"100 * sum by (instance) ({self._rate('wait_seconds_total')})", names)
        note = "Share of time that each rank spent waiting for others. A faint row among strong ones: that rank is late."
        return HeatMap("Waits of each rank", "%", note, self.step_s, rows)

    def _operations(self) -> Table:
        calls, raw = self._total("collectives_total", "op, codec"), self._total("raw_bytes_total", "op, codec")
        sent = self._total("sent_wire_bytes_total", "op, codec")
        seconds, number = (self._total(f"collective_duration_seconds_{what}", "op") for what in ("sum", "count"))
        p99 = self._slowest()
        rows = []
        for key in sorted(calls, key=lambda each: -sent.get(each, 0.0)):
            op, codec = key
            if calls[key] < 0.5 and sent.get(key, 0.0) < 1:
                continue
            mean = seconds[op,] / number[op,] if number.get((op,)) else None
            ratio = raw.get(key, 0.0) / sent[key] if sent.get(key) else None
            rows.append(
                [op, codec, f"{calls[key]:.0f}", quantity(sent.get(key, 0.0), "B"), "-" if ratio is None else f"{ratio:.2f}"]
                + ["-" if mean is None else quantity(mean, "s"), p99.get(op, "-")]
            )
        columns = ["op", "codec", "calls of all ranks", "sent", "ratio", "mean time of op", "99 % within"]
        return Table("Collectives", columns, rows, ("op", "codec"), "Slowest kinds are those with the longest last column.")

    def _slowest(self) -> dict[str, str]:
        """By operation, how long 99 % of its calls took at most."""
        grown = f"increase({self._metric('collective_duration_seconds_bucket')}[{math.ceil(self.end - self.start) + 1}s])"
        quantile = f"histogram_quantile(0.99, sum by (op, le) ({grown}))"
        found = self.server.query_range(quantile, self.end, self.end, 1.0)
        values = {each.metric.get("op", "?"): each.points[-1][1] for each in found}
        return {op: quantity(value, "s") for op, value in values.items() if math.isfinite(value)}

    def _failures(self, names: dict[str, str]) -> Table:
        rows = []
        for (instance, op, reason), count in sorted(self._total("collective_failures_total", "instance, op, reason").items()):
            if count > 0:
                rows.append([names.get(instance, instance), op, reason, f"{count:.0f}"])
        for metric, text in _FAULTS.items():
            for (instance,), count in sorted(self._total(metric, "instance").items()):
                if count > 0:
                    rows.append([names.get(instance, instance), "", text, f"{count:.0f}"])
        columns = ["rank", "op", "what", "how often"]
        note = "As far as Prometheus saw it: a rank that ends right after a failure may not be scraped once more."
        return Table("Failures", columns, rows, ("rank", "op", "what"), note, set(range(len(rows))), "Prometheus saw none.")

    def _ranks(self, names: dict[str, str], ranks: dict[str, dict[str, str]]) -> Table:
        calls, sent = self._total("collectives_total", "instance"), self._total("sent_wire_bytes_total", "instance")
        waits = self._total("wait_seconds_total", "instance")
        seconds = max(self.end - self.start, 1e-9)
        rows = [
            [
                names[instance].removeprefix("rank "),
                instance,
                ranks[instance].get("node", "?"),
                f"{calls.get((instance,), 0.0):.0f}",
            ]
            + [quantity(sent.get((instance,), 0.0), "B"), f"{100 * waits.get((instance,), 0.0) / seconds:.0f} %"]
            for instance in list(names)[:_MOST_INSTANCES_IN_TEXT]
        ]
        hidden = len(names) - len(rows)
        note = f"{hidden} more ranks are left out." if hidden else ""
        return Table("Ranks", ["rank", "instance", "node", "calls", "sent", "wait"], rows, ("instance", "node"), note)

    def _settings(self) -> Table:
        found: defaultdict[tuple[str, str], int] = defaultdict(int)
        for each in self.server.query(f"last_over_time({self._metric('build_info')}[{math.ceil(time.time() - self.start)}s])"):
            for label in ("version", "wire_version", "python"):
                found[label, each.metric.get(label, "?")] += 1
        rows = [[name, value, str(count)] for (name, value), count in sorted(found.items())]
        note = "Metrics carry versions only; recordings carry the settings of the job as well."
        return Table("Settings", ["what", "value", "ranks"], rows, ("what", "value"), note)


def _in_order(ranks: dict[str, dict[str, str]]) -> list[tuple[str, dict[str, str]]]:
    def key(item: tuple[str, dict[str, str]]) -> tuple[int, str]:
        rank = item[1].get("rank", "")
        return int(rank) if rank.isdecimal() else 1 << 30, item[0]

    return sorted(ranks.items(), key=key)
