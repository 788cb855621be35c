"""`squinchcomm simulate`: what an all-reduce would take in worlds that are not here."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from squinchcomm.cli.flags import check_outputs, listed, sizes
from squinchcomm.errors import ConfigError

if TYPE_CHECKING:
    from squinchcomm.cost import Layout
    from squinchcomm.machine import CodecCost, Machine

_ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
_GIVEN = "Default: see docs/cost-model.md."


def simulate(
    ranks: Annotated[str, typer.Option("-g", "--ranks", help="World sizes, separated by commas, up to 10,000,000.")] = "8",
    hosts: Annotated[int | None, typer.Option("--hosts", help="Hosts that they share evenly.")] = None,
    ranks_per_host: Annotated[
        int | None, typer.Option("--ranks-per-host", help="Or how many of them share a host. Default: 1.")
    ] = None,
    link: Annotated[str, typer.Option("--link", help="Rates of a host's link, separated by commas.")] = "1Gbit,10Gbit",
    codec: Annotated[str, typer.Option("--codec", help="Codecs, separated by commas.")] = "none,squinch6",
    dtype: Annotated[str, typer.Option("-d", "--datatype", help="float32, float16 or bfloat16.")] = "float32",
    min_bytes: Annotated[str, typer.Option("-b", "--minbytes", help="Smallest size, such as 4K, 1M, 1G.")] = "4K",
    max_bytes: Annotated[str, typer.Option("-e", "--maxbytes", help="Largest size.")] = "1G",
    step_factor: Annotated[float, typer.Option("-f", "--stepfactor", help="Factor between sizes.")] = 8.0,
    measured: Annotated[
        bool, typer.Option("--measure", help="Measure codecs, memory and processors of this machine first.")
    ] = False,
    latency: Annotated[float | None, typer.Option("--latency", help=f"Between hosts, us. {_GIVEN}")] = None,
    local_latency: Annotated[float | None, typer.Option("--local-latency", help=f"Inside a host, us. {_GIVEN}")] = None,
    hop: Annotated[float | None, typer.Option("--hop", help=f"Processor time of a rank for a hop, us. {_GIVEN}")] = None,
    frame: Annotated[
        float | None, typer.Option("--frame", help=f"Processor time of a frame between hosts, us. {_GIVEN}")
    ] = None,
    local_frame: Annotated[float | None, typer.Option("--local-frame", help=f"The same inside a host, us. {_GIVEN}")] = None,
    chunk: Annotated[
        float | None, typer.Option("--chunk", help=f"Processor time to send and sum a chunk, us. {_GIVEN}")
    ] = None,
    encoded_chunk: Annotated[float | None, typer.Option("--encoded-chunk", help=f"The same if encoded, us. {_GIVEN}")] = None,
    sockets: Annotated[float | None, typer.Option("--sockets", help=f"Through sockets, GB/s a core. {_GIVEN}")] = None,
    memory: Annotated[float | None, typer.Option("--memory", help=f"Copies, GB/s a host. {_GIVEN}")] = None,
    additions: Annotated[float | None, typer.Option("--additions", help=f"Of arrays, GB/s a core. {_GIVEN}")] = None,
    cores: Annotated[float | None, typer.Option("--cores", help="Processors of a host. Default: 8.")] = None,
    efficiency: Annotated[
        float | None, typer.Option("--efficiency", help=f"Part of a link that two hosts reach. {_GIVEN}")
    ] = None,
    incast: Annotated[
        float | None, typer.Option("--incast", help=f"Time that doubling the senders to a host adds, as a part. {_GIVEN}")
    ] = None,
    mtu: Annotated[int | None, typer.Option("--mtu", help="Bytes of an IP packet. Default: 1500.")] = None,
    codec_rates: Annotated[
        str | None,
        typer.Option("--codec-rates", metavar="E,D,R", help="Of lossy codecs: encode, decode, reduce, GB/s of float32 a core."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("-J", "--json", metavar="FILE", help="Write all numbers here, too.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw scaling curves to this .png: needs matplotlib.")
    ] = None,
) -> None:
    """Predicts all-reduces of any number of ranks, hosts and bytes: each algorithm's time, and the one that would be chosen."""
    from squinchcomm.cli import simulate_table
    from squinchcomm.config import Config

    layouts = _layouts(listed("-g", [ranks]), hosts, ranks_per_host)
    rates = [_rate(text) for text in listed("--link", [link])]
    wanted = sizes(min_bytes, max_bytes, step_factor)
    if dtype not in _ITEMSIZES:
        raise ConfigError(f"-d {dtype}: there are {', '.join(_ITEMSIZES)}")
    check_outputs(json_file, plot_file)
    changes = _changes(
        latency_s=("--latency", latency, 1e-6),
        local_latency_s=("--local-latency", local_latency, 1e-6),
        call_s=("--hop", hop, 1e-6),
        frame_s=("--frame", frame, 1e-6),
        local_frame_s=("--local-frame", local_frame, 1e-6),
        chunk_s=("--chunk", chunk, 1e-6),
        encoded_chunk_s=("--encoded-chunk", encoded_chunk, 1e-6),
        socket_bytes_per_s=("--sockets", sockets, 1e9),
        memory_bytes_per_s=("--memory", memory, 1e9),
        add_bytes_per_s=("--additions", additions, 1e9),
        cores=("--cores", cores, 1.0),
        link_efficiency=("--efficiency", efficiency, 1.0),
        incast=("--incast", incast, 1.0),
        mtu=("--mtu", mtu, 1),
    )
    machine = _machine(measured, changes)
    codecs = _codecs(listed("--codec", [codec]), measured, codec_rates)
    known = simulate_table.facts(machine, codecs, _source(measured, bool(changes) or codec_rates is not None))
    typer.echo("\n".join(simulate_table.header(known)))
    world = simulate_table.World(machine, dtype, _ITEMSIZES[dtype], Config.from_env().min_compress_bytes)
    rows = []
    for row in simulate_table.rows(world, layouts, rates, codecs, wanted):
        typer.echo(str(row))
        rows.append(row)
    if json_file is not None:
        json_file.write_text(json.dumps(known | {"rows": [row.as_json() for row in rows]}, indent=1) + "\n")
    if plot_file is not None:
        from squinchcomm.cli.simulate_plot import plot

        largest = max(layouts, key=lambda layout: layout.ranks)
        plot(plot_file, world, largest, rates[0], codecs, wanted)
        typer.echo(f"# plot: {plot_file}")


def _layouts(texts: list[str], hosts: int | None, ranks_per_host: int | None) -> list[Layout]:
    from squinchcomm.cost import Layout

    if hosts is not None and ranks_per_host is not None:
        raise ConfigError(f"--hosts {hosts} --ranks-per-host {ranks_per_host}: give one of them; the other follows")
    if ranks_per_host is not None and ranks_per_host < 1:
        raise ConfigError(f"--ranks-per-host {ranks_per_host}: give 1 or more")
    layouts = []
    for text in texts:
        if not text.isascii() or not text.isdigit() or int(text) < 2:
            raise ConfigError(f"-g {text}: give world sizes of 2 or more ranks, such as -g 8 or -g 8,64,512")
        ranks = int(text)
        count = hosts if hosts is not None else -(-ranks // (ranks_per_host or 1))
        try:
            layouts.append(Layout.even(ranks, count))
        except ConfigError as error:
            raise ConfigError(f"-g {text}: {error}") from None
    return layouts


def _rate(text: str) -> float:
    from squinchcomm.transport.options import parse_rate

    try:
        return parse_rate(text)
    except ConfigError as error:
        raise ConfigError(f"--link: {error}") from None


def _changes(**given: tuple[str, float | None, float]) -> dict[str, Any]:
    """Constants of the machine by name, of those flags that were given, each checked by itself so that the error names the flag."""
    from squinchcomm.machine import Machine

    changes: dict[str, Any] = {}
    for name, (flag, value, unit) in given.items():
        if value is not None:
            change: dict[str, Any] = {name: value * unit}
            try:
                replace(Machine(), **change)
            except ConfigError as error:
                raise ConfigError(f"{flag} {value:g}: {error}") from None
            changes |= change
    return changes


def _machine(measured: bool, changes: dict[str, Any]) -> Machine:
    from squinchcomm.machine import Machine, measure

    return replace(measure() if measured else Machine(), **changes)


def _codecs(names: list[str], measured: bool, rates: str | None) -> list[CodecCost]:
    from squinchcomm.machine import REPORTED_RATES, codec_cost, measure_codec

    given = None if rates is None else _codec_rates(rates)
    codecs = []
    for name in names:
        try:
            cost = measure_codec(name) if measured and given is None else codec_cost(name, given)
        except ConfigError as error:
            raise ConfigError(f"--codec {name}: {error}") from None
        if name not in REPORTED_RATES and not measured and given is None:
            raise ConfigError(f"--codec {name}: no report has its speed; add --measure, or --codec-rates E,D,R")
        codecs.append(cost)
    return codecs


def _codec_rates(text: str) -> tuple[float, float, float]:
    try:
        encode, decode, reduce = (float(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(f"--codec-rates {text}: give three numbers, such as 20,30,50") from None
    if not all(0 < number < math.inf for number in (encode, decode, reduce)):
        raise ConfigError(f"--codec-rates {text}: rates are above 0")
    return encode, decode, reduce


def _source(measured: bool, overridden: bool) -> str:
    source = "measured here (codecs, memory, additions, cores), else by default" if measured else "by default"
    return f"{source}{', or as given' if overridden else ''}"
