"""All-reduce through squinchcomm and gloo, interleaved on the same links of chosen rates.

    python benchmarks/links.py --quick            # 4 ranks, a few sizes, about 2 minutes
    python benchmarks/links.py --report           # everything, about 15 minutes; report in benchmarks/reports/

As root every rank lives in a network namespace with a shaped link. Otherwise squinchcomm's own rate limiter
emulates the links, and gloo, which has none, is only measured unshaped.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import links_report
import netns
from links_ranks import Ranks
from links_report import Row

KIB, MIB = 1024, 1024 * 1024
RATES = {"0.1Gbit": 0.1e9, "1Gbit": 1e9, "10Gbit": 10e9, "unshaped": None, "loopback": None}
SIZES = [4 * KIB, 32 * KIB, 256 * KIB, 2 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
SIZE_CAPS = {"0.1Gbit": 16 * MIB}  # a larger array takes gloo more than 5 s a call
CONTENDERS = ["squinch6", "none", "gloo-f32", "gloo-bf16"]
REPORTS = Path(__file__).resolve().parent / "reports"


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    ranks: list[int]
    per_host: int
    links: list[str]
    sizes: list[int]
    contenders: list[str]
    budget_s: float  # for the repeats of one size on one kind of link
    emulate: bool
    script: str = "links_rank.py"  # what a rank runs


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="All-reduce on shaped links: squinchcomm beside gloo, in one run.")
    parser.add_argument("--quick", action="store_true", help="4 ranks, 4K, 64K and 64M, 1Gbit, 10Gbit and unshaped")
    parser.add_argument("--ranks", type=int, nargs="+", default=None, help="world sizes")
    parser.add_argument("--per-host", type=int, default=1, metavar="N", help="ranks on each host; links join hosts")
    parser.add_argument("--links", nargs="+", choices=RATES, default=None, help="kinds of links")
    parser.add_argument("--sizes", nargs="+", type=_size, default=None, help="bytes of float32, with K, M or G")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, help="squinchcomm codecs, auto, gloo-f32, gloo-bf16")
    parser.add_argument("--budget", type=float, default=None, help="seconds for the repeats of one size on one kind of link")
    parser.add_argument(
        "--emulate", action="store_true", help="use squinchcomm's rate limiter even where namespaces can be had"
    )
    parser.add_argument("--no-extras", action="store_true", help="leave out start-up time and memory")
    parser.add_argument("-J", "--json", type=Path, metavar="FILE", help="write raw times there")
    parser.add_argument(
        "--report", action="store_true", help=f"write a dated report into {REPORTS.parent.name}/{REPORTS.name}/"
    )
    return parser.parse_args(arguments)


def plan_of(options: argparse.Namespace) -> Plan:
    """Defaults filled in."""
    quick = options.quick
    if options.per_host < 1 or any(size % options.per_host for size in options.ranks or [4]):
        raise SystemExit(f"links.py: --per-host {options.per_host} does not divide the ranks")
    return Plan(
        ranks=options.ranks or ([4] if quick or options.per_host > 1 else [2, 4]),
        per_host=options.per_host,
        links=options.links or (["1Gbit", "10Gbit", "loopback"] if quick else list(RATES)),
        sizes=options.sizes or ([4 * KIB, 64 * KIB, 64 * MIB] if quick else SIZES),
        contenders=options.contenders,
        budget_s=options.budget or (5.0 if quick else 10.0),
        emulate=options.emulate or netns.available() is not None,
    )


def measure(plan: Plan) -> Iterator[Row]:
    """Rows in the order of ranks, links and sizes, as they are measured."""
    for world_size in plan.ranks:
        between = [link for link in plan.links if link != "loopback"]
        with _network(plan, world_size) as network, Ranks(world_size, network, script=plan.script) as ranks:
            _open(ranks, plan.contenders)
            for link in between:
                contenders = plan.contenders
                if network is not None:
                    network.shape(RATES[link])
                elif ours := [name for name in contenders if not name.startswith("gloo")]:
                    ranks.ask("open_squinch", link_rate=None if RATES[link] is None else link)
                    contenders = contenders if RATES[link] is None else ours
                else:
                    continue
                _open_auto(ranks, contenders, None if network is not None or RATES[link] is None else link)
                for size in plan.sizes:
                    if size <= SIZE_CAPS.get(link, size):
                        yield from _cell(ranks, link, size, contenders, plan)
            ranks.ask("close")
        if "loopback" in plan.links:
            with Ranks(world_size, None, one_host=True) as ranks:
                _open(ranks, plan.contenders)
                _open_auto(ranks, plan.contenders, None)
                for size in plan.sizes:
                    yield from _cell(ranks, "loopback", size, plan.contenders, plan)
                ranks.ask("close")


def _cell(ranks: Ranks, link: str, size: int, contenders: list[str], plan: Plan) -> list[Row]:
    ranks.ask("load", count=size // 4)
    # Two rounds: the first one may load code or compile it.
    warm = ranks.ask("measure", contenders=contenders, repeats=2, check=True)
    round_s = sum(max(answer["times"][name][1] for answer in warm) for name in contenders)
    repeats = int(min(100, max(5 if round_s < 3 else 3, plan.budget_s / max(round_s, 1e-3))))
    answers = ranks.ask("measure", contenders=contenders, repeats=repeats, check=False)
    hosts = 1 if link == "loopback" else ranks.world_size // plan.per_host
    return links_report.rows(link, RATES[link], size, answers, [answer["checks"] for answer in warm], hosts)


def start_up(plan: Plan, world_size: int = 4, tries: int = 3) -> dict[str, Any]:
    """Seconds from starting `world_size` processes to the end of their first compressed all-reduce, kernels compiled before."""
    times = []
    for _ in range(tries + 1):  # the first one compiles what is not in the cache yet
        with _network(plan, world_size) as network, Ranks(world_size, network) as ranks:
            ranks.ask("first_call")
            times.append(time.perf_counter() - ranks.started)
    return {"start_to_first_allreduce_s": times[1:]}


def memory(plan: Plan, world_size: int = 4, size: int = 64 * MIB) -> dict[str, Any]:
    """Bytes that one all-reduce of `size` adds to a rank at its peak, for each contender in processes of its own."""
    extra = {}
    for name in plan.contenders:
        with _network(plan, world_size) as network, Ranks(world_size, network) as ranks:
            _open(ranks, [name])
            ranks.ask("load", count=256 * KIB)
            ranks.ask("measure", contenders=[name], repeats=2, check=False)
            ranks.ask("load", count=size // 4)
            extra[name] = max(answer["extra"] for answer in ranks.ask("memory", contender=name))
            ranks.ask("close")
    return {"memory_size": size, "memory_extra_bytes": extra}


def _open(ranks: Ranks, contenders: list[str]) -> None:
    if any(name.startswith("gloo") for name in contenders):
        ranks.ask("open_gloo")
    if any(not name.startswith("gloo") for name in contenders):
        ranks.ask("open_squinch")
    if any(name.endswith("/flat") for name in contenders):
        ranks.ask("open_flat")


def _open_auto(ranks: Ranks, contenders: list[str], emulated: str | None) -> None:
    if "auto" in contenders:
        answer = ranks.ask("open_auto", link_rate=emulated)[0]
        print(f"# auto: {answer['crossover']}, joined in {answer['seconds']:.2f} s", flush=True)


def _network(plan: Plan, world_size: int) -> netns.Network | nullcontext[None]:
    return nullcontext(None) if plan.emulate else netns.Network(world_size // plan.per_host)


def _extras(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = {}
    text = []
    if "squinch6" in plan.contenders:
        found |= start_up(plan)
        text.append(
            f"start of 4 processes to the end of their first all-reduce: {median(found['start_to_first_allreduce_s']):.2f} s"
        )
    found |= memory(plan)
    amounts = ", ".join(f"{name} {extra / MIB:.0f} MiB" for name, extra in found["memory_extra_bytes"].items())
    text.append(f"peak memory that an all-reduce of {found['memory_size'] // MIB} MiB adds to a rank, 4 ranks: {amounts}")
    return found | {"text": text}


def _size(text: str) -> int:
    factors = {"K": KIB, "M": MIB, "G": 1024 * MIB}
    return int(text[:-1]) * factors[text[-1].upper()] if text[-1].upper() in factors else int(text)


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(arguments: list[str]) -> int:
    """Measures, prints, writes; 1 if any result was wrong."""
    options = parse(arguments)
    plan = plan_of(options)
    # A terminated run has to take its namespaces and processes along.
    signal.signal(signal.SIGTERM, _terminate)
    links = f"network namespaces, veth, tbf on both ends, MTU {netns.MTU}"
    if plan.emulate:
        links = f"loopback, EMULATED by squinchcomm's rate limiter ({netns.available() or 'asked for'}); gloo only unshaped"
    settings = links_report.environment(links)
    print(*links_report.header(settings), links_report.COLUMNS, sep="\n", flush=True)
    made = []
    for row in measure(plan):
        print(links_report.line(row), flush=True)
        made.append(row)
    extras = {} if options.no_extras else _extras(plan)
    print(*links_report.footer(made, extras), sep="\n")
    if options.json:
        links_report.write_json(options.json, settings, made, extras)
    if options.report:
        print(f"# report: {links_report.write_report(REPORTS, settings, made, extras)}")
    return 0 if all(row.ok for row in made) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
