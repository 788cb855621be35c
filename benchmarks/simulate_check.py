"""The cost model against measured all-reduces on shaped links between namespaces.

    python benchmarks/simulate_check.py                  # 2, 4 and 8 hosts, then 2 hosts of 4 ranks, three rates: about 12 minutes
    python benchmarks/simulate_check.py --report         # and a dated report in benchmarks/reports/
    python benchmarks/simulate_check.py --worlds 1x4 --links 1Gbit --sizes 16M --budget 2

Needs root and iproute2. The model's constants come from other runs than those that it predicts: exchanges of empty, medium and large frames
(`all_to_all`) on links that do not limit them, for processor times and latency, large ones on 1 Gb/s links for efficiency and incast,
and the kernels, alone, for the codecs. No constant is adjusted to an all-reduce.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any

import links
import links_report
import netns
import numpy as np

from squinchcomm.collectives.plan import Plan
from squinchcomm.config import parse_size
from squinchcomm.cost import DIRECT, HIERARCHICAL, PAIRWISE, Layout, Prediction, algorithms, doublings, predict
from squinchcomm.machine import CodecCost, Machine, measure, measure_codec

KIB, MIB = 1024, 1024 * 1024
CODECS = ["none", "squinch6"]
WORLDS = [(1, 2), (1, 4), (1, 8), (4, 2)]  # ranks on each host, hosts
MIN_COMPRESS_BYTES = 64 * KIB
CALIBRATION_RANKS = (2, 4, 8)
FAST = "10Gbit"
_SCRIPT = str(Path(__file__).with_name("simulate_rank.py"))
_PORT = 22999
FLOOR, AIM = 0.25, 0.10


@dataclass(frozen=True)
class Cell:
    """One measured all-reduce beside its prediction."""

    link: str
    ranks: int
    hosts: int
    size: int
    codec: str
    repeats: int
    measured_s: float
    fastest_s: float
    predicted: Prediction

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.time_s / self.measured_s - 1

    def __str__(self) -> str:
        part = self.predicted
        return (
            f"{self.link:>9} {self.ranks:>5} {self.hosts:>5} {self.size:>10} {self.codec:<10} {part.algorithm:<12} {self.repeats:>4}"
            f" {1e6 * self.measured_s:>11.0f} {1e6 * self.fastest_s:>11.0f} {1e6 * part.time_s:>13.0f} {100 * self.error:>+8.1f}"
            f" {1e6 * part.link_s:>10.0f} {1e6 * part.processor_s:>14.0f} {1e6 * (part.latency_s + part.exposed_s):>12.0f}"
        )


COLUMNS = (
    f"{'link':>9} {'ranks':>5} {'hosts':>5} {'size(B)':>10} {'codec':<10} {'algorithm':<12} {'n':>4} {'median(us)':>11} {'fastest(us)':>11}"
    f" {'predicted(us)':>13} {'error(%)':>8} {'link(us)':>10} {'processors(us)':>14} {'exposed(us)':>12}"
)


def exchanges(ranks: int, rate: float | None, plan: list[tuple[int, int]]) -> list[dict[str, float]]:
    """What `simulate_rank` measured for each of `plan` (bytes to each peer, repeats): the slowest rank's time, the mean processor time."""
    with netns.Network(ranks) as network:
        network.shape(rate)
        common = {"world_size": ranks, "address": f"tcp://{network.address(0)}:{_PORT}", "interface": netns.INTERFACE}
        processes = []
        try:
            for rank in range(ranks):
                settings = json.dumps(common | {"rank": rank, "host": network.names[rank], "plan": plan})
                command = network.command(rank, [sys.executable, _SCRIPT, settings])
                processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            outputs = [process.communicate(timeout=120) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for process, (_, complaints) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"a rank of the calibration failed: {complaints[-2000:]}")
    answers = [json.loads(output) for output, _ in outputs]
    return [
        {"time_s": max(each["time_s"] for each in step), "processor_s": fmean(each["processor_s"] for each in step)}
        for step in zip(*answers, strict=True)
    ]


def calibrate() -> tuple[Machine, dict[str, Any]]:
    """The constants of this machine, all of it, and what they were made from."""
    rows: list[list[float]] = []
    times: list[float] = []
    raw: list[dict[str, Any]] = []
    for ranks in CALIBRATION_RANKS:
        plan = [(0, 200), (24 * KIB, 100), (32 * MIB // (ranks - 1), 3)]
        for (part, _), found in zip(plan, exchanges(ranks, links.RATES[FAST], plan), strict=True):
            frames = (ranks - 1) * max(1, Plan([0, part], 1, 1).chunks(0))
            rows.append([1.0, frames, (ranks - 1) * part])
            times.append(found["processor_s"])
            raw.append({"ranks": ranks, "part_bytes": part, "link": FAST} | found)
    call_s, frame_s, byte_s = fitted(np.array(rows), np.array(times))
    machine = replace(measure(), call_s=call_s, frame_s=frame_s, socket_bytes_per_s=1 / byte_s)
    slow = []
    for ranks in CALIBRATION_RANKS:
        part = 24 * MIB // (ranks - 1)
        (found,) = exchanges(ranks, 1e9, [(part, 5)])
        raw.append({"ranks": ranks, "part_bytes": part, "link": "1Gbit"} | found)
        slow.append(found["time_s"] / ((ranks - 1) * part * machine.wire_factor * 8 / 1e9))
    efficiency = min(1.0, 1 / slow[0])
    growth = [
        (each * efficiency - 1) / doublings(ranks - 1) for each, ranks in zip(slow[1:], CALIBRATION_RANKS[1:], strict=True)
    ]
    incast = fmean(growth)
    if incast < 0:  # two hosts alone do worst: the model has no term for that, so all get the mean
        efficiency, incast = min(1.0, 1 / fmean(slow)), 0.0
    latency_s = max(0.0, raw[0]["time_s"] - raw[0]["processor_s"])  # of two ranks, with a processor each
    machine = replace(machine, latency_s=latency_s, local_latency_s=latency_s)
    return replace(machine, link_efficiency=efficiency, incast=incast), {"exchanges": raw}


def fitted(demands: np.ndarray, times: np.ndarray) -> list[float]:
    """Costs of a call, a frame and a byte that fit the times best, by the squares of relative errors; a call costs nothing or more."""
    scaled = demands / times[:, None]
    costs = np.linalg.lstsq(scaled, np.ones(len(times)), rcond=None)[0]
    if costs[0] < 0:
        costs = np.append([0.0], np.linalg.lstsq(scaled[:, 1:], np.ones(len(times)), rcond=None)[0])
    return [float(cost) for cost in costs]


def bursts(names: list[str]) -> dict[str, float]:
    """Bytes that each kind of link lets pass at once, as the kernel says."""
    found = {}
    with netns.Network(1) as network:
        for name in names:
            network.shape(links.RATES[name])
            command = ["tc", "-j", "-n", network.names[0], "qdisc", "show", "dev", netns.INTERFACE]
            shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            found[name] = float(next((each["options"]["burst"] for each in shown if each["kind"] == "tbf"), 0))
    return found


def cells(
    worlds: list[tuple[int, int]],
    names: list[str],
    sizes: list[int],
    budget_s: float,
    machine: Machine,
    codecs: list[CodecCost],
) -> Iterator[Cell]:
    """Measures, and predicts each cell from the constants alone."""
    burst = bursts(names)
    # Where hosts have several ranks both algorithms are measured, whatever would be chosen.
    os.environ["SQUINCH_ALGORITHM"] = "hierarchical"
    for per_host, hosts in worlds:
        contenders = CODECS if per_host == 1 else [*CODECS, *(f"{codec}/flat" for codec in CODECS)]
        plan = links.Plan([per_host * hosts], per_host, names, sizes, contenders, budget_s, emulate=False)
        for row in links.measure(plan):
            if not row.ok:
                raise RuntimeError(f"a wrong result: {row}")
            if row.size < MIN_COMPRESS_BYTES and not row.contender.startswith("none"):
                continue  # lossless too: the same call once more
            host = replace(machine, link_bits_per_s=row.rate or 1e12, link_burst_bytes=burst[row.link]).divided(row.hosts)
            yield cell(row, host, {codec.name: codec for codec in codecs})


def cell(row: links_report.Row, host: Machine, codecs: dict[str, CodecCost]) -> Cell:
    """A row beside what the model says of it."""
    name, _, flat = row.contender.partition("/")
    codec = codecs[name]
    layout = Layout.even(row.ranks, row.hosts)
    possible = algorithms(layout, row.size, codec)
    algorithm = DIRECT if DIRECT in possible else PAIRWISE if flat or not layout.layered else HIERARCHICAL
    predicted = predict(algorithm, layout, row.size, codec, host)
    return Cell(row.link, row.ranks, row.hosts, row.size, codec.name, row.repeats, row.time_s, min(row.raw_s), predicted)


def summary(made: list[Cell]) -> list[str]:
    """How far off, in all and by what bounds the time."""
    lines = []
    groups = {"all cells": made}
    for bound in ("link", "processors", "latency"):
        groups[f"bound by {bound}"] = [each for each in made if each.predicted.bound == bound]
    for hosts in sorted({each.hosts for each in made}):
        groups[f"{hosts} hosts"] = [each for each in made if each.hosts == hosts]
    for name, group in groups.items():
        if group:
            errors = sorted(abs(each.error) for each in group)
            within = [sum(error <= limit for error in errors) for limit in (AIM, FLOOR)]
            lines.append(
                f"# {name}: {len(errors)}; |error| median {100 * median(errors):.1f} %, largest {100 * errors[-1]:.1f} %; "
                f"within {100 * AIM:.0f} %: {within[0]}, within {100 * FLOOR:.0f} %: {within[1]}"
            )
    fastest = [abs(each.predicted.time_s / each.fastest_s - 1) for each in made]
    return [
        *lines,
        f"# against the fastest repeats: |error| median {100 * median(fastest):.1f} %, largest {100 * max(fastest):.1f} %",
    ]


def constants(machine: Machine, codecs: list[CodecCost]) -> list[str]:
    """The constants, in words."""
    shared = (
        f"# constants of the whole machine: {machine.cores:g} cores; latency {1e6 * machine.latency_s:.0f} us, a hop "
        f"{1e6 * machine.call_s:.0f} us and a frame {1e6 * machine.frame_s:.0f} us of a processor; sockets "
        f"{machine.socket_bytes_per_s / 1e9:.2f}, copies {machine.memory_bytes_per_s / 1e9:.1f}, additions "
        f"{machine.add_bytes_per_s / 1e9:.1f} GB/s; link efficiency {machine.link_efficiency:.3f}, incast "
        f"{machine.incast:.3f}"
    )
    own = [
        f"# {codec.name}: encode {codec.encode_bytes_per_s / 1e9:.1f}, decode {codec.decode_bytes_per_s / 1e9:.1f}, "
        f"reduce {codec.reduce_bytes_per_s / 1e9:.1f} GB/s of float32"
        for codec in codecs
        if not codec.lossless
    ]
    return [shared, *own]


def header(settings: dict[str, Any]) -> list[str]:
    """Lines above the table."""
    return [
        f"# {settings['command']}",
        f"# {settings['date']}, {settings['processor']}, {settings['cores']} cores, Linux {settings['kernel']}, "
        f"load {settings['load']}",
        f"# links: {settings['links']}",
        "# median and fastest: of n repeats of the slowest rank's time. error: predicted / median - 1.",
        "# link, processors, exposed: what the model adds up to: latency + exposed + max(link, processors - exposed).",
    ]


def write(settings: dict[str, Any], lines: list[str], raw: dict[str, Any], target: Path | None, *, report: bool) -> None:
    """JSON where asked for, and the report."""
    text = json.dumps({"settings": settings} | raw) + "\n"
    if target:
        target.write_text(text)
    if report:
        stamp = datetime.fromisoformat(settings["date"]).strftime("%Y-%m-%d-%H%M")
        path = links.REPORTS / f"simulate-{stamp}.md"
        path.with_suffix(".json").write_text(text)
        title = [f"# Cost model against measurement, {settings['date']}", ""]
        how = ["How the constants were had: [cost-model.md](../../docs/cost-model.md#validation).", ""]
        raw_link = [f"Raw numbers: [{path.stem}.json]({path.stem}.json).", "", "```"]
        path.write_text("\n".join([*title, *how, *raw_link, *lines, "```", ""]))
        print(f"# report: {path}")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="The cost model against measured all-reduces on shaped links.")
    parser.add_argument("--worlds", type=_world, nargs="+", default=WORLDS, help="ranks on each host x hosts, such as 1x4 4x2")
    parser.add_argument(
        "--links",
        nargs="+",
        choices=[name for name in links.RATES if name != "loopback"],
        default=["0.1Gbit", "1Gbit", "10Gbit"],
        help="kinds of links",
    )
    sizes = [4 * KIB, 256 * KIB, 2 * MIB, 16 * MIB, 64 * MIB]
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=sizes, help="bytes of float32, with K, M or G")
    parser.add_argument("--budget", type=float, default=4.0, help="seconds for the repeats of one size on one kind of link")
    parser.add_argument("-J", "--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--report", action="store_true", help="write a dated report into benchmarks/reports/")
    return parser.parse_args(arguments)


def _world(text: str) -> tuple[int, int]:
    per_host, _, hosts = text.partition("x")
    if not (per_host.isdigit() and hosts.isdigit() and int(per_host) >= 1 and int(hosts) >= 2):
        raise argparse.ArgumentTypeError(f"{text}: write ranks on each host x hosts, two hosts or more, such as 1x4 or 4x2")
    return int(per_host), int(hosts)


def main(arguments: list[str]) -> int:
    """Measures, predicts, prints; 1 if a prediction is off by more than the floor."""
    options = parse(arguments)
    if reason := netns.available():
        print(f"simulate_check.py: no network namespaces: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    settings = links_report.environment(f"network namespaces, veth, tbf on both ends, MTU {netns.MTU}")
    settings["command"] = shlex.join(["python", "benchmarks/simulate_check.py", *sys.argv[1:]])
    settings["load"] = "{:.1f} {:.1f} {:.1f} before the run".format(*os.getloadavg())
    machine, evidence = calibrate()
    codecs = [measure_codec(name) for name in CODECS]
    lines = [*header(settings), *constants(machine, codecs), COLUMNS]
    print(*lines, sep="\n", flush=True)
    made = []
    for each in cells(options.worlds, options.links, options.sizes, options.budget, machine, codecs):
        print(each, flush=True)
        made.append(each)
        lines.append(str(each))
    print(*summary(made), sep="\n")
    lines += summary(made)
    raw = {"machine": asdict(machine), "codecs": [asdict(codec) for codec in codecs]} | evidence
    raw["cells"] = [asdict(each) | {"error": each.error} for each in made]
    write(settings, lines, raw, options.json, report=options.report)
    return 0 if all(abs(each.error) <= FLOOR for each in made) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
