"""`squinchcomm inspect`: what each codec does to saved gradients, and which tensors to leave alone."""

from __future__ import annotations

import fnmatch
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from squinchcomm.cli.flags import check_outputs, listed
from squinchcomm.errors import ConfigError

if TYPE_CHECKING:
    from squinchcomm.gradient_files import GradientFile, Tensor
    from squinchcomm.inspection import Finding
    from squinchcomm.kernels import Codec

_SORTS = ("file", "name", "size", "snr", "bias", "zeroed", "largest", "smallest", "nonfinite")
_QUIET_S = 2.0
_LINE_S = 10.0


def inspect(
    file: Annotated[Path, typer.Argument(help="Gradients: .safetensors or .npz, float16, bfloat16, float32 or float64.")],
    codec: Annotated[str | None, typer.Option("--codec", help="Codecs to look at, separated by commas. Default: all.")] = None,
    wanted: Annotated[
        str, typer.Option("--wanted", help="Codec that the advice starts from, and that --sort goes by.")
    ] = "squinch6",
    only: Annotated[
        list[str] | None, typer.Option("--filter", metavar="GLOB", help="Only tensors of these names, such as 'blocks.*'.")
    ] = None,
    sort: Annotated[str, typer.Option("--sort", help=f"Worst or largest first: {', '.join(_SORTS)}.")] = "file",
    max_elements: Annotated[
        int, typer.Option("--max-elements", help="Look at evenly spread runs of this many elements of a larger tensor; 0: all.")
    ] = 1 << 24,
    min_snr: Annotated[float, typer.Option("--min-snr", help="Advise against a codec below this many dB.")] = 20.0,
    json_file: Annotated[Path | None, typer.Option("-J", "--json", metavar="FILE", help="Write all numbers here, too.")] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw to this .png: needs matplotlib.")
    ] = None,
) -> None:
    """Measures what each codec loses of each tensor of a file, and says which codec to use for which.

    Nothing is unpickled. Memory does not grow with the file.
    """
    from squinchcomm.cli import inspect_table
    from squinchcomm.gradient_files import open_gradients
    from squinchcomm.inspection import Limits, advise

    codecs = _codecs(codec, wanted)
    _check_flags(sort, max_elements, min_snr, json_file, plot_file)
    limits = Limits(min_snr_db=min_snr)
    with open_gradients(file) as opened:
        tensors = _selected(opened, only)
        left_out = [tensor for tensor in tensors if tensor.left_out]
        findings = _findings(opened, [tensor for tensor in tensors if not tensor.left_out], codecs, max_elements)
    _sort(findings, sort, wanted)
    advice = [advise(finding, codecs, wanted, limits) for finding in findings]
    inspect_table.show(str(file), findings, advice, left_out, wanted, limits)
    if json_file is not None:
        known = inspect_table.as_json(str(file), findings, advice, left_out, wanted, limits)
        json_file.write_text(json.dumps(known, indent=1, allow_nan=False) + "\n")
    if plot_file is not None and findings:
        from squinchcomm.cli.inspect_plot import plot

        plot(plot_file, findings, advice, wanted)
        typer.echo(f"# plot: {plot_file}")


def _codecs(names: str | None, wanted: str) -> list[Codec]:
    """Those asked for, or all; "none" and `wanted`, which the advice needs, among them."""
    from squinchcomm.kernels import codec_names, get_codec

    chosen = list(codec_names()) if names is None else listed("--codec", [names])
    found = []
    for flag, name in [*(("--codec", name) for name in chosen), ("--wanted", wanted), ("--codec", "none")]:
        try:
            found.append(get_codec(name))
        except ConfigError as error:
            raise ConfigError(f"{flag} {name}: {error}") from None
    return list(dict.fromkeys(found))


def _check_flags(sort: str, max_elements: int, min_snr: float, json_file: Path | None, plot_file: Path | None) -> None:
    if sort not in _SORTS:
        raise ConfigError(f"--sort {sort}: there are {', '.join(_SORTS)}")
    if max_elements < 0:
        raise ConfigError(f"--max-elements {max_elements}: give a number of elements, or 0 for all")
    if not math.isfinite(min_snr):
        raise ConfigError(f"--min-snr {min_snr}: give a number of dB")
    check_outputs(json_file, plot_file)


def _selected(opened: GradientFile, only: list[str] | None) -> list[Tensor]:
    if not opened.tensors:
        raise ConfigError(f"{opened.path}: holds no tensors")
    if not only:
        return opened.tensors
    found = [tensor for tensor in opened.tensors if any(fnmatch.fnmatchcase(tensor.name, glob) for glob in only)]
    if not found:
        names = ", ".join(repr(tensor.name) for tensor in opened.tensors[:5])
        raise ConfigError(f"--filter {' '.join(only)}: fits none of {len(opened.tensors)} tensors, such as {names}")
    return found


def _findings(opened: GradientFile, tensors: list[Tensor], codecs: list[Codec], most: int) -> list[Finding]:
    from squinchcomm.inspection import examine, sample_spans
    from squinchcomm.kernels import warm_up

    warm_up()
    spans = {tensor.name: sample_spans(tensor.count, most) for tensor in tensors}
    found = []
    with _Progress(sum(stop - start for each in spans.values() for start, stop in each)) as progress:
        for tensor in tensors:
            pieces = progress.over(opened.spans(tensor, spans[tensor.name]))
            found.append(examine(tensor.name, tensor.dtype, tensor.count, pieces, codecs))
    return found


def _sort(findings: list[Finding], by: str, wanted: str) -> None:
    """Worst, largest or most first; names from a to z."""

    def snr(finding: Finding) -> float:
        snr_db = finding.loss(wanted).snr_db
        return math.inf if snr_db is None else snr_db

    keys: dict[str, Any] = {
        "name": lambda finding: finding.name,
        "size": lambda finding: -finding.count,
        "snr": snr,
        "bias": lambda finding: -abs(finding.loss(wanted).bias or 0.0),
        "zeroed": lambda finding: -finding.loss(wanted).zeroed_share,
        "largest": lambda finding: -finding.largest,
        "smallest": lambda finding: finding.smallest,
        "nonfinite": lambda finding: -finding.nonfinite,
    }
    if by in keys:
        findings.sort(key=keys[by])


class _Progress:
    """On stderr, once it has taken 2 s: a bar in a terminal, else a line now and then. A context manager."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._start = self._last = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def over(self, pieces: Iterator[Any]) -> Iterator[Any]:
        """The pieces, each counted once the next one is asked for."""
        for piece in pieces:
            yield piece
            self._done += piece.size
            now = time.monotonic()
            if now - self._start < _QUIET_S:
                continue
            if sys.stderr.isatty():
                self._show_bar()
            elif now - self._last > _LINE_S:
                self._last = now
                print(f"# {self._done:,} of {self._total:,} elements", file=sys.stderr)

    def _show_bar(self) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True, redirect_stdout=False)
            self._bar.add_task("inspecting", total=self._total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=self._done)
