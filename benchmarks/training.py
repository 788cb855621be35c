"""Training with DDP over slow links: communication time of a step, and what compression does to the loss.

    python benchmarks/training.py --quick            # a few rounds and one seed of short trainings, about 2 minutes
    python benchmarks/training.py --report           # everything, about half an hour; report in benchmarks/reports/
    python benchmarks/training.py --only steps       # or losses

Results are kept in build/training.jsonl as they come; a run with the same settings goes on from there, `--fresh` starts anew. As root
every rank lives in a network namespace with a shaped link. Otherwise only losses are measured: gloo has no rate limiter.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import netns
import training_report
from links_ranks import Ranks
from training_contenders import CONTENDERS, OF_LOSSES, OF_STEPS

REPORTS = Path(__file__).resolve().parent / "reports"
RAW = Path(__file__).resolve().parents[1] / "build" / "training.jsonl"
# 10.7 M parameters. Accelerators would compute beside the network; here computing shares two cores with it, so there is little.
STEP_SHAPE = {"width": 384, "layers": 6, "length": 32, "batch": 1}
LOSS_SHAPE = {"width": 128, "layers": 2, "length": 64, "batch": 4, "learning_rate": 2e-3}
CURVE_POINTS = 20  # of the training loss
MOST_BUCKET_MB = 1024


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="7 rounds; 100 steps, one seed, three contenders")
    parser.add_argument("--only", choices=("steps", "losses"), help="one half of the benchmark")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--gbit", type=float, default=1.0, help="rate of every link in Gb/s")
    parser.add_argument("--rounds", type=int, help="measured steps of each contender (default 40)")
    parser.add_argument("--steps", type=int, help="steps of each training (default 1000)")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds of the trainings (default 0 1 2)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help="instead of all")
    parser.add_argument(
        "--bucket-mb", type=float, help="DDP's bucket_cap_mb when steps are timed (default torch's; not PowerSGD's)"
    )
    parser.add_argument("--bucket-view", action="store_true", help="DDP's gradient_as_bucket_view when steps are timed")
    parser.add_argument("--raw", type=Path, default=RAW, metavar="FILE", help="where results are kept as they come")
    parser.add_argument("--fresh", action="store_true", help="forget the results kept there")
    parser.add_argument(
        "--report", action="store_true", help=f"write a dated report into {REPORTS.parent.name}/{REPORTS.name}/"
    )
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (7 if options.quick else 40)
    options.steps = options.steps or (100 if options.quick else 1000)
    options.seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    if options.ranks < 2 or options.gbit <= 0 or options.steps < CURVE_POINTS:
        parser.error(f"--ranks must be at least 2, --gbit above 0, --steps at least {CURVE_POINTS}")
    if options.bucket_mb is not None and not 0 < options.bucket_mb <= MOST_BUCKET_MB:
        parser.error(f"--bucket-mb must be above 0 and at most {MOST_BUCKET_MB}, not {options.bucket_mb:g}")
    return options


class Kept:
    """Results in a file, a JSON object a line."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        # An interrupted run may have left half a line.
        lines = path.read_text().splitlines() if path.exists() else []
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]
        path.write_text("".join(json.dumps(record) + "\n" for record in self.records))

    def add(self, record: dict[str, Any]) -> None:
        """Keeps one more."""
        self.records.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def having(self, **fields: Any) -> list[dict[str, Any]]:
        """Those with these values."""
        return [record for record in self.records if all(record.get(name) == value for name, value in fields.items())]


def measure_steps(options: argparse.Namespace, kept: Kept) -> list[dict[str, Any]]:
    """Rounds in which every contender takes a step with averaging and one without; contenders take turns in going first."""
    contenders = list(options.contenders or OF_STEPS)
    ddp = {"bucket_cap_mb": options.bucket_mb, "gradient_as_bucket_view": options.bucket_view}
    settings = {"ranks": options.ranks, "gbit": options.gbit, "contenders": contenders, "ddp": ddp, **STEP_SHAPE}
    done = len(kept.having(kind="round", settings=settings))
    if done < options.rounds:
        with netns.Network(options.ranks) as network, Ranks(options.ranks, network, script="training_rank.py") as ranks:
            network.shape(options.gbit * 1e9)
            answers = ranks.ask("open_models", contenders=contenders, ddp=ddp, **STEP_SHAPE)
            kept.add({"kind": "check", "settings": settings, "ranks": answers})
            for number in range(done, options.rounds):
                turn = number % len(contenders)
                answers = ranks.ask("time_round", contenders=contenders[turn:] + contenders[:turn])
                kept.add({"kind": "round", "settings": settings, "ranks": answers})
                print(training_report.round_line(number + 1, options.rounds, answers), flush=True)
    return kept.having(kind="check", settings=settings)[-1:] + kept.having(kind="round", settings=settings)


def measure_losses(options: argparse.Namespace, kept: Kept) -> list[dict[str, Any]]:
    """Trainings of every contender with every seed, seeds one after the other, so that an interrupted run can be compared."""
    quick = ("gloo-f32", "hook-gloo", "hook-feedback") if options.quick else OF_LOSSES
    contenders = list(options.contenders or quick)
    settings = {"ranks": options.ranks, "steps": options.steps, **LOSS_SHAPE}
    wanted = [(seed, name) for seed in options.seeds for name in contenders]
    missing = [
        (seed, name) for seed, name in wanted if not kept.having(kind="training", settings=settings, seed=seed, contender=name)
    ]
    if missing:
        with _unshaped(options.ranks) as network, Ranks(options.ranks, network, script="training_rank.py") as ranks:
            for number, (seed, name) in enumerate(missing, 1):
                record = train(ranks, name, seed, settings)
                kept.add({"kind": "training", "settings": settings, "seed": seed, "contender": name, **record})
                print(f"{number:3}/{len(missing)} {training_report.training_line(name, seed, record)}", flush=True)
    return [kept.having(kind="training", settings=settings, seed=seed, contender=name)[-1] for seed, name in wanted]


def train(ranks: Ranks, contender: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One training: mean training losses on the way, loss on all held-out text, whether all ranks hold the same parameters."""
    ranks.ask("begin", contender=contender, seed=seed, settings=settings)
    started = time.monotonic()
    curve: list[tuple[int, float]] = []
    for last in _evenly(settings["steps"]):
        first = curve[-1][0] if curve else 0
        losses = ranks.ask("advance", steps=last - first, timeout_s=1800.0)
        curve.append((last, sum(losses) / len(losses)))
    answers = ranks.ask("evaluate")
    return {
        "seconds": time.monotonic() - started,
        "training_loss": curve,
        "held_out_loss": sum(answer["loss"] for answer in answers) / sum(answer["pieces"] for answer in answers),
        "identical": len({answer["digest"] for answer in answers}) == 1,
    }


def _evenly(steps: int) -> Iterator[int]:
    return (steps * part // CURVE_POINTS for part in range(1, CURVE_POINTS + 1))


def _unshaped(ranks: int) -> netns.Network | nullcontext[None]:
    return nullcontext(None) if netns.available() else netns.Network(ranks)


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(arguments: list[str]) -> int:
    """Measures, prints, writes; 1 if a result was wrong or ranks differed."""
    options = parse(arguments)
    # A terminated run has to take its namespaces and processes along.
    signal.signal(signal.SIGTERM, _terminate)
    kept = Kept(options.raw, fresh=options.fresh)
    rounds: list[dict[str, Any]] = []
    reason = netns.available()
    if options.only != "losses" and reason is None:
        rounds = measure_steps(options, kept)
    elif options.only != "losses":
        print(f"# times of steps left out: they need shaped links in network namespaces, and here is {reason}")
    trainings = [] if options.only == "steps" else measure_losses(options, kept)
    steps, losses = training_report.step_rows(rounds), training_report.loss_rows(trainings)
    print(*training_report.tables(steps, losses), sep="\n")
    if options.report:
        print(f"# report: {training_report.write(REPORTS, steps, losses, rounds, trainings)}")
    return 0 if all(row.ok for row in steps) and all(row.ok for row in losses) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
