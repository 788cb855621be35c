"""What ranks say of themselves: their metrics, from their exporters, from text files, or as a Prometheus server keeps them."""

from __future__ import annotations

import http.client
import math
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from squinchcomm.cli.prometheus_api import Server, quoted, reason
from squinchcomm.errors import ConfigError

PREFIX = "squinchcomm_"
ANSWER_S = 2.0  # for a rank to answer
WINDOW_S = 120  # of what a Prometheus server keeps: two scrapes at its default period of 60 s

_MAX_BYTES = 16 << 20
_AT_ONCE = 32
_NEEDED = (
    "collectives_total",
    "collective_failures_total",
    "collective_duration_seconds_sum",
    "raw_bytes_total",
    "sent_wire_bytes_total",
    "received_wire_bytes_total",
    "encode_seconds_total",
    "decode_seconds_total",
    "wait_seconds_total",
    "inflight_collectives",
    "last_collective_timestamp_seconds",
    "rank_info",
)

Samples = dict[str, list[tuple[dict[str, str], float]]]


@dataclass(frozen=True)
class Reading:
    """Metrics of one rank at one moment, or why there are none.

    Attributes:
        target: Where they are from: host:port, a file, or an instance of a Prometheus server.
        at: Unix time at which they held, or at which they could not be had.
        samples: Labels and values by name, without the prefix "squinchcomm_".
        problem: Why there are none.
    """

    target: str
    at: float
    samples: Samples = field(default_factory=dict)
    problem: str | None = None

    def total(self, name: str, **labels: str) -> float:
        """The sum of the series of that name that have these labels."""
        return sum(value for has, value in self.samples.get(name, []) if labels.items() <= has.items())

    @property
    def info(self) -> dict[str, str]:
        """The labels of `rank_info`: rank, world_size and so on; empty before the rank has joined."""
        return next((labels for labels, value in self.samples.get("rank_info", []) if value == 1), {})


class Source(Protocol):
    """Where readings are from."""

    def read(self) -> list[Reading]:
        """What there is now, maybe with earlier readings before it. Raises ConfigError if there is nothing to look at."""


@dataclass(frozen=True)
class Exporters:
    """HTTP exporters of ranks, asked all at once. `targets` names them as host:port, each time anew."""

    targets: Callable[[], list[str]]

    def read(self) -> list[Reading]:
        """One reading a target."""
        targets = self.targets()
        with ThreadPoolExecutor(min(_AT_ONCE, len(targets)), "scrape") as pool:
            return list(pool.map(_scrape, targets))


@dataclass(frozen=True)
class Textfiles:
    """Files as SQUINCH_METRICS_FILE makes them: one, or all `*.prom` of a folder."""

    path: Path

    def read(self) -> list[Reading]:
        """One reading a file; it is as old as the file."""
        files = sorted(self.path.glob("*.prom")) if self.path.is_dir() else [self.path]
        if not files:
            raise ConfigError(f"--file {self.path}: holds no *.prom; was SQUINCH_METRICS_FILE set in the job?")
        readings = [_read_file(path) for path in files]
        # node_exporter's folder has files of other programs, too.
        ours = [each for each in readings if each.samples or each.problem != _NOT_OURS]
        return ours or readings


@dataclass(frozen=True)
class Scraped:
    """What a Prometheus server has scraped of a job's ranks within the last two minutes."""

    server: Server
    job: str

    def read(self) -> list[Reading]:
        """Up to two readings of each instance, its latest ones; a problem follows where its latest scrape failed."""
        names = "|".join(("up", *(PREFIX + name for name in _NEEDED)))
        found = self.server.query(f'{{__name__=~"{names}", job={quoted(self.job)}}}[{WINDOW_S}s]')
        if not found:
            raise ConfigError(
                f"--prometheus {self.server.url}: has no series of job {self.job!r} from the last {WINDOW_S} s; "
                "is it scraped under another name (--job)?"
            )
        moments: defaultdict[str, dict[float, Samples]] = defaultdict(dict)
        up: dict[str, tuple[float, float]] = {}
        for series in found:
            labels = dict(series.metric)
            name, instance = labels.pop("__name__", ""), labels.pop("instance", "?")
            of_instance = moments[instance]
            if name == "up":
                up[instance] = series.points[-1]
                continue
            for at, value in series.points:
                of_instance.setdefault(at, {}).setdefault(name.removeprefix(PREFIX), []).append((labels, value))
        readings = []
        for instance, by_time in sorted(moments.items()):
            latest = sorted(by_time)[-2:]
            readings += [Reading(instance, at, by_time[at]) for at in latest]
            at, value = up.get(instance, (0.0, 1.0))
            if value == 0:
                readings.append(Reading(instance, at, problem="Prometheus cannot scrape it"))
            elif not latest:
                readings.append(Reading(instance, at, problem=_NOT_OURS))
        return readings


_NOT_OURS = "answers without metrics of squinchcomm"


def parse(text: str) -> Samples:
    """The series of squinchcomm in Prometheus's text format. Raises ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: Samples = defaultdict(list)
    for family in text_string_to_metric_families(text):
        if family.name.startswith(PREFIX):
            for sample in family.samples:
                if math.isfinite(sample.value):
                    samples[sample.name.removeprefix(PREFIX)].append((sample.labels, sample.value))
    return dict(samples)


def _scrape(target: str) -> Reading:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ranks are not behind a proxy of this user
    try:
        with opener.open(f"http://{target}/metrics", timeout=ANSWER_S) as answer:
            text = _read_in_time(answer).decode()
        return _judged(target, time.time(), text)
    except urllib.error.HTTPError as error:
        with error:
            return Reading(target, time.time(), problem=f"answers with HTTP status {error.code}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Reading(target, time.time(), problem=reason(error))


def _read_in_time(answer: http.client.HTTPResponse) -> bytes:
    """The whole answer. Raises TimeoutError: a socket's own timeout would begin anew with each byte that drips in."""
    deadline, parts, size = time.monotonic() + ANSWER_S, [], 0
    while part := answer.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
            raise TimeoutError
        if size > _MAX_BYTES:
            raise ValueError("answers with more than 16 MiB")
    return b"".join(parts)


def _read_file(path: Path) -> Reading:
    try:
        return _judged(path.name, path.stat().st_mtime, path.read_text())
    except (OSError, ValueError) as error:
        return Reading(path.name, time.time(), problem=reason(error))


def _judged(target: str, at: float, text: str) -> Reading:
    try:
        samples = parse(text)
    except (ValueError, KeyError, IndexError):
        return Reading(target, at, problem="answers with something that is no metrics")
    return Reading(target, at, samples, None if samples else _NOT_OURS)
