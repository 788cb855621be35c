"""The cost model against measured all-reduces on shaped links between namespaces.

    python benchmarks/simulate_check.py                  # 2, 4 and 8 hosts, then 2 hosts of 4 ranks, three rates: about 8 minutes
    python benchmarks/simulate_check.py --report         # and a dated report in benchmarks/reports/
    python benchmarks/simulate_check.py --rescore FILE   # what the model of today says of times measured before
    python benchmarks/simulate_check.py --worlds 1x4 --links 1Gbit --sizes 16M --budget 2

Needs root and iproute2. The model's constants come from other runs than those that it predicts: exchanges of empty and large frames
(`all_to_all`) and of small chunks that are summed (`reduce_scatter`) between 2, 4 and 8 ranks on links that do not limit them, for
processor times and latency, large ones on each kind of link up to 1 Gb/s for its efficiency and incast, and the kernels, alone, for the
codecs. No constant is adjusted to an all-reduce.
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
from statistics import median
from typing import Any

import links
import links_report
import netns
from simulate_constants import FAST, RANK, SLOW, Exchange, Kernels, Link, calibrate, derive, derive_links

from squinchcomm.config import parse_size
from squinchcomm.cost import DIRECT, HIERARCHICAL, PAIRWISE, Layout, Prediction, algorithms, predict
from squinchcomm.machine import CodecCost, Machine

KIB, MIB = 1024, 1024 * 1024
CODECS = ["none", "squinch6"]
WORLDS = [(1, 2), (1, 4), (1, 8), (4, 2)]  # ranks on each host, hosts
MIN_COMPRESS_BYTES = 64 * KIB
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


@dataclass(frozen=True)
class Model:
    """What predictions are made from.

    Attributes:
        machine: All of it, shared by the namespaces.
        codecs: Costs by name.
        links: Each kind of link.
    """

    machine: Machine
    codecs: dict[str, CodecCost]
    links: dict[str, Link]

    def predict(self, algorithm: str, layout: Layout, link: str, size: int, codec: str) -> Prediction:
        """An all-reduce of `size` bytes of float32 between namespaces."""
        kind = self.links[link]
        host = replace(
            self.machine,
            link_bits_per_s=links.RATES[link] or 1e12,
            link_burst_bytes=kind.burst_bytes,
            link_efficiency=kind.efficiency,
            incast=kind.incast,
        )
        return predict(algorithm, layout, size, self.codecs[codec], host.divided(layout.hosts))


COLUMNS = (
    f"{'link':>9} {'ranks':>5} {'hosts':>5} {'size(B)':>10} {'codec':<10} {'algorithm':<12} {'n':>4} {'median(us)':>11} {'fastest(us)':>11}"
    f" {'predicted(us)':>13} {'error(%)':>8} {'link(us)':>10} {'processors(us)':>14} {'exposed(us)':>12}"
)


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


def rows(worlds: list[tuple[int, int]], names: list[str], sizes: list[int], budget_s: float) -> Iterator[links_report.Row]:
    """All-reduces of each world, link, size and codec, measured."""
    # Where hosts have several ranks both algorithms are measured, whatever would be chosen.
    os.environ["SQUINCH_ALGORITHM"] = "hierarchical"
    for per_host, hosts in worlds:
        contenders = CODECS if per_host == 1 else [*CODECS, *(f"{codec}/flat" for codec in CODECS)]
        plan = links.Plan([per_host * hosts], per_host, names, sizes, contenders, budget_s, emulate=False, script=RANK)
        for row in links.measure(plan):
            if not row.ok:
                raise RuntimeError(f"a wrong result: {row}")
            if row.size >= MIN_COMPRESS_BYTES or row.contender == "none":  # else the same call once more
                yield row


def cell(row: links_report.Row, model: Model) -> Cell:
    """A row beside what the model says of it."""
    name, _, flat = row.contender.partition("/")
    layout = Layout.even(row.ranks, row.hosts)
    possible = algorithms(layout, row.size, model.codecs[name])
    algorithm = DIRECT if DIRECT in possible else PAIRWISE if flat or not layout.layered else HIERARCHICAL
    predicted = model.predict(algorithm, layout, row.link, row.size, name)
    return Cell(row.link, row.ranks, row.hosts, row.size, name, row.repeats, row.time_s, min(row.raw_s), predicted)


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


def constants(model: Model) -> list[str]:
    """The constants, in words."""
    machine = model.machine
    shared = (
        f"# constants of the whole machine: {machine.cores:g} cores; latency {1e6 * machine.latency_s:.0f} us, a hop "
        f"{1e6 * machine.call_s:.0f} us, a frame {1e6 * machine.frame_s:.0f} us ({1e6 * machine.local_frame_s:.0f} inside a host), its "
        f"chunk {1e6 * machine.chunk_s:.0f} us ({1e6 * machine.encoded_chunk_s:.0f} encoded) of a processor; sockets "
        f"{machine.socket_bytes_per_s / 1e9:.2f}, copies {machine.memory_bytes_per_s / 1e9:.1f}, additions "
        f"{machine.add_bytes_per_s / 1e9:.1f} GB/s"
    )
    shaped = [
        f"# {name}: burst {link.burst_bytes / 1e3:.0f} KB, efficiency {link.efficiency:.3f}, incast {link.incast:.3f}"
        for name, link in model.links.items()
    ]
    own = [
        f"# {codec.name}: encode {codec.encode_bytes_per_s / 1e9:.1f}, decode {codec.decode_bytes_per_s / 1e9:.1f}, "
        f"reduce {codec.reduce_bytes_per_s / 1e9:.1f} GB/s of float32"
        for codec in model.codecs.values()
        if not codec.lossless
    ]
    return [shared, *own, *shaped]


def header(settings: dict[str, Any]) -> list[str]:
    """Lines above the table."""
    return [
        f"# {settings['command']}",
        f"# {settings['date']}, {settings['processor']}, {settings['cores']} cores, Linux {settings['kernel']}, "
        f"load {settings['load']}",
        f"# links: {settings['links']}",
        "# median and fastest: of n repeats, from the mean of the ranks' calls to the last return. error: predicted / median - 1.",
        "# link, processors, exposed: what the model adds up to; its exposed includes latency (docs/cost-model.md).",
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
    parser.add_argument(
        "--rescore", type=Path, metavar="FILE", help="measure nothing: predict the times in such a JSON file anew"
    )
    parser.add_argument("--report", action="store_true", help="write a dated report into benchmarks/reports/")
    return parser.parse_args(arguments)


def _world(text: str) -> tuple[int, int]:
    per_host, _, hosts = text.partition("x")
    if not (per_host.isdigit() and hosts.isdigit() and int(per_host) >= 1 and int(hosts) >= 2):
        raise argparse.ArgumentTypeError(f"{text}: write ranks on each host x hosts, two hosts or more, such as 1x4 or 4x2")
    return int(per_host), int(hosts)


def rescore(file: Path) -> int:
    """Derives the constants and predicts the measured times of a JSON file of this benchmark anew, with the model as it is now."""
    raw = json.loads(file.read_text())
    codecs = {name: CodecCost(**cost) for name, cost in raw["codecs"].items()}
    made = [Exchange(**each) for each in raw["exchanges"]]
    machine = derive(Machine(**raw["machine"]), codecs["squinch6"], made)
    model = Model(
        machine, codecs, derive_links(machine, made, {name: each["burst_bytes"] for name, each in raw["links"].items()})
    )
    found = []
    for saved in raw["cells"]:
        layout = Layout.even(saved["ranks"], saved["hosts"])
        algorithm = saved.pop("predicted")["algorithm"]
        predicted = model.predict(algorithm, layout, saved["link"], saved["size"], saved["codec"])
        found.append(Cell(**saved, predicted=predicted))
    print(
        *header(raw["settings"]), f"# predicted anew from {file}", *constants(model), COLUMNS, *found, *summary(found), sep="\n"
    )
    return 0 if all(abs(each.error) <= FLOOR for each in found) else 1


def main(arguments: list[str]) -> int:
    """Measures, predicts, prints; 1 if a prediction is off by more than the floor."""
    options = parse(arguments)
    if options.rescore:
        try:
            return rescore(options.rescore)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            print(
                f"simulate_check.py: {options.rescore} does not suit this benchmark and its model: {error!r}", file=sys.stderr
            )
            return 2
    if reason := netns.available():
        print(f"simulate_check.py: no network namespaces: {reason}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    settings = links_report.environment(f"network namespaces, veth, tbf on both ends, MTU {netns.MTU}")
    settings["command"] = shlex.join(["python", "benchmarks/simulate_check.py", *sys.argv[1:]])
    settings["load"] = "{:.1f} {:.1f} {:.1f} before the run".format(*os.getloadavg())
    names = list(dict.fromkeys([*options.links, FAST, SLOW]))
    made = calibrate(names)
    measured: list[links_report.Row] = []
    kernels = [Kernels.measured(CODECS)]
    for row in rows(options.worlds, options.links, options.sizes, options.budget):
        if measured and (row.link, row.ranks, row.hosts) != (measured[-1].link, measured[-1].ranks, measured[-1].hosts):
            kernels.append(Kernels.measured(CODECS))
        measured.append(row)
        print(f"measured: {row.link}, {row.hosts} hosts, {row.size} bytes, {row.contender}", file=sys.stderr, flush=True)
    made += calibrate(names)  # the machine may have become slower or quicker in the meantime
    typical = Kernels.mean([*kernels, Kernels.measured(CODECS)])
    machine = derive(typical.machine, typical.codecs["squinch6"], made)
    model = Model(machine, typical.codecs, derive_links(machine, made, bursts(names)))
    found = [cell(row, model) for row in measured]
    lines = [*header(settings), *constants(model), COLUMNS, *map(str, found), *summary(found)]
    print(*lines, sep="\n")
    raw = asdict(model) | {"exchanges": [asdict(each) for each in made], "cells": [asdict(each) for each in found]}
    write(settings, lines, raw, options.json, report=options.report)
    return 0 if all(abs(each.error) <= FLOOR for each in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
