"""Runs the plan of `squinchcomm bench` on this rank, in step with the others."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import squinchcomm
from squinchcomm.cli import bench_table
from squinchcomm.cli.bench_ops import OPERATIONS, Trial
from squinchcomm.cli.bench_table import Row
from squinchcomm.errors import ConfigError
from squinchcomm.kernels.dtypes import canonical_dtype

if TYPE_CHECKING:
    from rich.progress import Progress

    from squinchcomm.communicator import Communicator

_QUIET_S = 2.0  # no progress bar before this many seconds


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    sizes: list[int]
    ops: list[str]
    codecs: list[str]
    iterations: int
    warmup: int
    check: bool
    reduction: str
    dtype: str
    root: int


def measure(plan: Plan, json_file: Path | None) -> int:
    """Measures, prints the table on rank 0, writes `json_file` there if given; returns the exit status."""
    rows: list[Row] = []
    with squinchcomm.init() as comm:
        if plan.root >= comm.world_size:
            raise ConfigError(
                f"-r {plan.root}: there are {comm.world_size} ranks; the root is one of 0 to {comm.world_size - 1}"
            )
        known = bench_table.facts(_settings(comm, plan))
        with _Screen(plan, comm.rank == 0) as screen:
            screen.say(*bench_table.header(known))
            for op in plan.ops:
                for row in _rows(comm, plan, op, screen):
                    rows.append(row)
                    screen.say(str(row))
        screen.say(*bench_table.footer(rows))
        failed = any(row.wrong for row in rows)
        if json_file is not None and comm.rank == 0:
            report = {**known, "ok": not failed, "results": [row.as_json() for row in rows]}
            try:
                json_file.write_text(json.dumps(report, indent=1) + "\n")
            except OSError as error:
                raise ConfigError(f"-J {json_file}: {error.strerror}; the table above is all that is left") from None
    return int(failed and comm.rank == 0)


def _settings(comm: Communicator, plan: Plan) -> dict[str, Any]:
    config = comm.config
    link = f"emulated by the transport's rate limiter, {config.link_rate} a rank" if config.link_rate else "as it is"
    return {
        "cores": len(os.sched_getaffinity(0)),
        "ranks": f"{comm.world_size} on {len(set(comm.hosts))} host(s)",
        "transport": config.transport,
        "link": link,
        "scheme": config.scheme,
        "security": config.security,
        "chunk_bytes": config.chunk_bytes or "auto",
        "min_compress_bytes": config.min_compress_bytes,
        "codec_threads": config.codec_threads or "auto",
        "iterations": f"{plan.iterations} after {plan.warmup} to warm up, codecs in turns: {', '.join(plan.codecs)}",
    }


def _rows(comm: Communicator, plan: Plan, op: str, screen: _Screen) -> Iterator[Row]:
    operation = OPERATIONS[op]
    if op == "sendrecv" and comm.world_size == 1:
        raise ConfigError("--op sendrecv needs two ranks; give -g 2")
    screen.say(*bench_table.heading(op, comm.world_size, operation.factor(comm.world_size)))
    codecs = plan.codecs if operation.encodings else ["none"]
    if codecs != plan.codecs:
        screen.say(f"# {op} is always lossless")
    for size in plan.sizes if op != "barrier" else [0]:
        trial = Trial(comm, op, size // canonical_dtype(plan.dtype).itemsize, plan.dtype, plan.reduction, plan.root)
        yield from _measured(comm, plan, trial, codecs, screen)


def _measured(comm: Communicator, plan: Plan, trial: Trial, codecs: list[str], screen: _Screen) -> Iterator[Row]:
    times = np.zeros((plan.iterations, len(codecs)))
    wires = np.zeros(len(codecs))
    for iteration in range(-plan.warmup, plan.iterations):
        for index, codec in enumerate(codecs):
            duration, wires[index] = _once(comm, trial, codec)
            if iteration >= 0:
                times[iteration, index] = duration
            screen.advance()
    verdicts = [_judged(comm, trial, codec) if plan.check else (None, None) for codec in codecs]
    slowest, sent = _combined(comm, times, "max"), _combined(comm, wires, "sum" if trial.operation.to_root else "max")
    for index, (codec, (wrong, relerr)) in enumerate(zip(codecs, verdicts, strict=True)):
        yield Row(
            op=trial.name,
            codec=codec,
            size_bytes=trial.nbytes,
            count=trial.count,
            dtype=plan.dtype,
            reduction=trial.reduction,
            root=plan.root if trial.operation.rooted else -1,
            times_us=[round(each * 1e6, 3) for each in slowest[:, index]],
            factor=trial.operation.factor(comm.world_size),
            wire_bytes=int(sent[index]),
            wrong=wrong,
            max_relerr=relerr,
        )


def _once(comm: Communicator, trial: Trial, codec: str) -> tuple[float, int]:
    """Seconds, and bytes sent."""
    trial.reset()
    comm.barrier()
    # Not the bytes received: a peer that is ahead may have sent some of its next call already.
    sent = comm.stats.sent_wire_bytes
    start = time.perf_counter()
    trial.call(codec)
    return time.perf_counter() - start, comm.stats.sent_wire_bytes - sent


def _judged(comm: Communicator, trial: Trial, codec: str) -> tuple[int, float]:
    """Wrong elements on all ranks, and the largest relative error on any."""
    trial.reset()
    trial.call(codec)
    verdict = trial.check(codec)
    found = _everybody(comm, [verdict.wrong, verdict.error, verdict.magnitude, trial.digest() or 0])
    differing = sum(digest != found[0, 3] for digest in found[:, 3])
    magnitude = found[:, 2].max()
    return int(found[:, 0].sum() + differing), float(found[:, 1].max() / magnitude) if magnitude else 0.0


def _combined(comm: Communicator, array: Any, reduction: str) -> Any:
    comm.allreduce(array, reduction, codec="none")
    return array


def _everybody(comm: Communicator, values: list[float]) -> Any:
    table = np.zeros((comm.world_size, len(values)))
    comm.all_gather(table, np.array(values, np.float64))
    return table


class _Screen:
    """What rank 0 shows: lines on stdout, and, if stderr is a terminal, a bar there once it has taken two seconds."""

    def __init__(self, plan: Plan, first: bool) -> None:
        rounds = plan.iterations + plan.warmup
        self._total = sum(
            (len(plan.sizes) if op != "barrier" else 1) * rounds * (len(plan.codecs) if OPERATIONS[op].encodings else 1)
            for op in plan.ops
        )
        self._first = first
        self._done, self._start = 0, time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, *lines: str) -> None:
        """Prints lines on rank 0."""
        if not self._first:
            return
        if self._bar is not None and sys.stdout.isatty():
            # Both are on one terminal: rich puts the lines above the bar.
            self._bar.console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
        else:
            print(*lines, sep="\n", flush=True)

    def advance(self) -> None:
        """One call is done."""
        self._done += 1
        if self._bar is None and self._first and sys.stderr.isatty() and time.monotonic() - self._start > _QUIET_S:
            self._bar = _bar(self._total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)


def _bar(total: int) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True, redirect_stdout=False)
    bar.add_task("measuring", total=total)
    bar.start()
    return bar
