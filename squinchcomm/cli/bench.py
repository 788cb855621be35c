"""`squinchcomm bench`: how fast, how many bytes, how exact; flags and columns as in nccl-tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from squinchcomm.cli.flags import check_writable, listed, sizes
from squinchcomm.cli.processes import MAX_RANKS, Job
from squinchcomm.errors import ConfigError

if TYPE_CHECKING:
    from squinchcomm.cli.bench_run import Plan

_OPS = "allreduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter, all_to_all, sendrecv, barrier"


def bench(
    min_bytes: Annotated[str, typer.Option("-b", "--minbytes", help="Smallest size, such as 4K, 1M, 1G.")] = "1M",
    max_bytes: Annotated[str, typer.Option("-e", "--maxbytes", help="Largest size.")] = "64M",
    step_factor: Annotated[float, typer.Option("-f", "--stepfactor", help="Factor between sizes.")] = 4.0,
    step_bytes: Annotated[
        str | None, typer.Option("-i", "--stepbytes", help="Bytes between sizes, instead of a factor.")
    ] = None,
    iterations: Annotated[int, typer.Option("-n", "--iters", min=1, help="Measured iterations.")] = 10,
    warmup: Annotated[int, typer.Option("-w", "--warmup_iters", min=0, help="Iterations before them.")] = 3,
    check: Annotated[int, typer.Option("-c", "--check", min=0, max=1, help="1 checks results, 0 does not.")] = 1,
    reduction: Annotated[str, typer.Option("-o", "--redop", help="sum, avg, min, max or product.")] = "sum",
    dtype: Annotated[str, typer.Option("-d", "--datatype", help="Element type, such as float32 or bfloat16.")] = "float32",
    root: Annotated[int, typer.Option("-r", "--root", min=0, help="Root of rooted collectives.")] = 0,
    json_file: Annotated[Path | None, typer.Option("-J", "--json", metavar="FILE", help="Write all numbers here, too.")] = None,
    op: Annotated[list[str] | None, typer.Option("--op", help=f"Repeatable, or separated by commas: {_OPS}, or all.")] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            "--codec", help="Repeatable, or separated by commas; measured in turns. Default: none; SQUINCH_CODEC is not asked."
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("-g", "--ranks", min=1, max=MAX_RANKS, help="Ranks to start, when no launcher did.")
    ] = None,
) -> None:
    """Measures collectives; starts its own ranks (two, or -g), or runs under squinchcomm run, torchrun, mpirun or srun."""
    from squinchcomm.cli.bench_run import Plan, measure
    from squinchcomm.launch import detect

    plan = Plan(
        sizes=_sizes(min_bytes, max_bytes, step_factor, step_bytes),
        ops=listed("--op", op or ["allreduce"]),
        codecs=listed("--codec", codec or ["none"]),
        iterations=iterations,
        warmup=warmup,
        check=bool(check),
        reduction={"prod": "product"}.get(reduction, reduction),
        dtype={"float": "float32", "double": "float64", "half": "float16"}.get(dtype, dtype),
        root=root,
    )
    plan = _validated(plan)
    info = detect()
    if json_file is not None and info.rank == 0:
        check_writable("-J", json_file)
    if info.source == "none":
        raise typer.Exit(_start_ranks(ranks or 2))
    if ranks is not None and ranks != info.world_size:
        raise ConfigError(f"-g {ranks}: {info.source} has started {info.world_size} ranks already; leave -g out")
    raise typer.Exit(measure(plan, json_file))


def _sizes(first: str, last: str, factor: float, step: str | None) -> list[int]:
    found = sizes(first, last, factor, step)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if found[-1] > memory:
        raise ConfigError(f"-e {last}: arrays of {found[-1]} bytes do not fit this machine's memory of {memory} bytes")
    return found


def _validated(plan: Plan) -> Plan:
    from dataclasses import replace

    from squinchcomm.cli.bench_check import DTYPES, REDUCTIONS
    from squinchcomm.cli.bench_ops import OPERATIONS
    from squinchcomm.collectives.reduction import check_reduction
    from squinchcomm.kernels import codec_names
    from squinchcomm.kernels.dtypes import canonical_dtype

    if plan.ops == ["all"]:
        plan = replace(plan, ops=list(OPERATIONS))
    allowed = (
        ("--op", plan.ops, list(OPERATIONS)),
        ("--codec", plan.codecs, list(codec_names())),
        ("-o", [plan.reduction], REDUCTIONS),
        ("-d", [plan.dtype], DTYPES),
    )
    for flag, values, known in allowed:
        for value in values:
            if value not in known:
                raise ConfigError(f"{flag} {value}: unknown; there are {', '.join(known)}")
    if any(OPERATIONS[op].reduces for op in plan.ops):
        try:
            check_reduction(plan.reduction, canonical_dtype(plan.dtype))
        except ValueError as error:
            raise ConfigError(f"-o {plan.reduction} -d {plan.dtype}: {error}") from None
    return plan


def _start_ranks(count: int) -> int:
    job = Job([sys.executable, "-m", "squinchcomm", *sys.argv[1:]], count, output="inherited")
    return job.run()
