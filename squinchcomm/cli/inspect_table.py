"""What `squinchcomm inspect` prints and writes: the table, the advice, JSON."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from squinchcomm import __version__
from squinchcomm.inspection import Advice, Finding, Limits, Loss

if TYPE_CHECKING:
    from squinchcomm.gradient_files import Tensor

_TOTAL = "(all)"


def show(
    source: str, findings: list[Finding], advice: list[Advice], left_out: list[Tensor], wanted: str, limits: Limits
) -> None:
    """Prints everything: rows of tensors and codecs, what was left out, and the advice."""
    seen, count = (sum(getattr(finding, name) for finding in findings) for name in ("seen", "count"))
    sampled = f", {seen:,} of them looked at (--max-elements)" if seen < count else ""
    typer.echo(f"# squinchcomm inspect {shown(source)}  squinchcomm {__version__}")
    typer.echo(f"# tensors: {len(findings)}, elements: {count:,}{sampled}; left out: {len(left_out)}")
    if findings:
        typer.echo(
            "# zeroed: elements other than 0 that come back as 0; bias: change of the mean magnitude; bits: of an element"
        )
        _print_rows(findings, totals(findings))
    for tensor in left_out:
        typer.echo(f"# left out: {shown(tensor.name)} ({tensor.dtype}, {tensor.count:,} elements): {tensor.left_out}")
    if findings:
        typer.echo("\n".join(["#", *advice_lines(findings, advice, wanted, limits)]))


def totals(findings: list[Finding]) -> list[Loss]:
    """What each codec loses of all tensors together."""
    sums = [Loss(loss.codec) for loss in findings[0].losses]
    for finding in findings:
        for total, loss in zip(sums, finding.losses, strict=True):
            total.add(loss)
    return sums


def _print_rows(findings: list[Finding], sums: list[Loss]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(markup=False, highlight=False, emoji=False)
    table = Table(box=None, pad_edge=False, header_style="bold" if console.is_terminal else "")
    table.add_column("tensor", overflow="fold")
    for title in ("dtype", "elements", "smallest", "largest", "zeros", "NaN/inf", "codec", "bits", "SNR(dB)", "bias", "zeroed"):
        table.add_column(title, justify="left" if title in ("dtype", "codec") else "right", no_wrap=True)
    whole = Finding(_TOTAL, "", sum(finding.count for finding in findings), losses=sums)
    for finding in [*findings, whole]:
        facts = _facts(finding) if finding is not whole else [_TOTAL, "", f"{whole.count:,}", "", "", "", ""]
        for index, loss in enumerate(finding.losses):
            # In a terminal a tensor's facts stand once; lines for other programs are complete.
            left = [""] * len(facts) if index and console.is_terminal else facts
            table.add_row(*(Text(cell) for cell in [*left, *_cells(loss)]))
    if not console.is_terminal:
        console.width = 110 + max(len(_TOTAL), *(len(shown(finding.name)) for finding in findings))
    console.print(table)


def _facts(finding: Finding) -> list[str]:
    smallest = "-" if math.isinf(finding.smallest) else f"{finding.smallest:.1e}"
    return [
        shown(finding.name),
        finding.dtype,
        f"{finding.count:,}" + ("*" if finding.seen < finding.count else ""),
        smallest,
        f"{finding.largest:.1e}",
        f"{100 * finding.zeros / finding.seen:.3g}%",
        f"{finding.nonfinite:,}",
    ]


def _cells(loss: Loss) -> list[str]:
    snr_db, bias = loss.snr_db, loss.bias
    snr = "-" if snr_db is None else "exact" if math.isinf(snr_db) else f"{snr_db:.1f}"
    return [
        loss.codec,
        f"{loss.bits:.2f}",
        snr,
        "-" if bias is None else f"{100 * bias:+.3f}%",
        f"{100 * loss.zeroed_share:.3g}%",
    ]


def advice_lines(findings: list[Finding], advice: list[Advice], wanted: str, limits: Limits) -> list[str]:
    """The policy in words, and as settings or code to paste."""
    others = [(finding, each) for finding, each in zip(findings, advice, strict=True) if each.reason is not None]
    lines = [
        f"# Advice: {wanted} where the SNR is at least {limits.min_snr_db:g} dB, the mean magnitude keeps within "
        f"{100 * limits.max_bias:g} %, and no more than {100 * limits.max_zeroed:g} % of the elements vanish"
    ]
    broken = [finding for finding in findings if finding.nonfinite]
    if broken:
        names = ", ".join(shown(finding.name) for finding in broken[:5]) + (" ..." if len(broken) > 5 else "")
        lines.append(f"# NaN or infinity in {names}: no advice on these; training skips such a step, so inspect another one")
    if not others:
        return [*lines, f"# {wanted} suits all of them. Set:", f"SQUINCH_CODEC={wanted}"]
    lines.append(f"# It does not suit {len(others)} of {len(findings)} tensors. In a loop of your own:")
    lines.append("CODECS = {")
    lines += [f"    {finding.name!r}: {each.codec!r},  # {each.reason}" for finding, each in others]
    return [
        *lines,
        "}",
        "for name, parameter in model.named_parameters():",
        f'    comm.allreduce(parameter.grad, "avg", codec=CODECS.get(name, {wanted!r}))',
    ]


def as_json(
    source: str, findings: list[Finding], advice: list[Advice], left_out: list[Tensor], wanted: str, limits: Limits
) -> dict[str, Any]:
    """All of it. An SNR of null is that of an array that comes back exactly ("exact": true) or holds zeros alone."""
    return {
        "command": ["squinchcomm", *sys.argv[1:]],
        "version": __version__,
        "file": source,
        "wanted": wanted,
        "limits": asdict(limits),
        "tensors": [
            {
                "name": finding.name,
                "dtype": finding.dtype,
                "elements": finding.count,
                "seen": finding.seen,
                "zeros": finding.zeros,
                "nonfinite": finding.nonfinite,
                "smallest": _finite(finding.smallest),
                "largest": finding.largest,
                "codecs": {loss.codec: _numbers(loss) for loss in finding.losses},
                "advice": asdict(each),
            }
            for finding, each in zip(findings, advice, strict=True)
        ],
        "all": {loss.codec: _numbers(loss) for loss in totals(findings)} if findings else {},
        "left_out": [
            {"name": tensor.name, "dtype": tensor.dtype, "elements": tensor.count, "reason": tensor.left_out}
            for tensor in left_out
        ],
    }


def _numbers(loss: Loss) -> dict[str, Any]:
    snr_db = loss.snr_db
    return {
        "bits": loss.bits,
        "snr_db": _finite(snr_db),
        "exact": snr_db is not None and math.isinf(snr_db),
        "bias": _finite(loss.bias),
        "zeroed_share": loss.zeroed_share,
        "spoiled": loss.spoiled,
    }


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def shown(name: str) -> str:
    """A name out of a file as it may go to a terminal: escape sequences in it are shown, not obeyed."""
    return name if name.isprintable() else ascii(name)
