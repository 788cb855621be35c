"""Saved gradients as a picture: signal over noise by codec, zeroed elements, range of magnitudes, tensor by tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from squinchcomm.cli.inspect_table import shown
from squinchcomm.inspection import Advice, Finding

_COLOURS = ("#0b6fb8", "#b03030", "#2a7f3f", "#7a3fa0", "#8a5a00")
_NAMED = 60  # more names than this do not fit
_ROW_INCHES = 0.24


def plot(path: Path, findings: list[Finding], advice: list[Advice], wanted: str) -> None:
    """Writes a PNG: a row a tensor, in the order given; those that `wanted` does not suit have their names in red."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    height = 2.2 + _ROW_INCHES * min(len(findings), _NAMED)
    figure, axes = pyplot.subplots(1, 3, figsize=(15, height), sharey=True, layout="constrained")
    rows = range(len(findings))
    for index, loss in enumerate(findings[0].losses):
        losses = [finding.loss(loss.codec) for finding in findings]
        style = {"color": _COLOURS[index % len(_COLOURS)], "s": 16, "label": loss.codec}
        if any(each.snr_db is not None and math.isfinite(each.snr_db) for each in losses):
            axes[0].scatter([_or_nan(each.snr_db) for each in losses], rows, **style)
        axes[1].scatter([100 * each.zeroed_share for each in losses], rows, **style)
    known = [row for row in rows if findings[row].largest > 0]
    axes[2].hlines(
        known, [findings[row].smallest for row in known], [findings[row].largest for row in known], color=_COLOURS[0]
    )
    _finish(axes, bool(known))
    _name_rows(axes[0], findings, advice)
    figure.suptitle(f"{len(findings)} tensors; names in red: {wanted} does not suit")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _finish(axes: Any, scaled: bool) -> None:
    axes[0].set(title="signal over noise; exact codecs are left out", xlabel="SNR (dB)")
    axes[1].set(title="elements other than 0 that come back as 0", xlabel="%")
    axes[2].set(title="magnitudes other than 0", xlabel="smallest to largest")
    if scaled:
        axes[2].set_xscale("log")
    axes[1].legend(frameon=False, fontsize=8)
    for each in axes:
        each.grid(alpha=0.25)


def _name_rows(axes: Any, findings: list[Finding], advice: list[Advice]) -> None:
    axes.invert_yaxis()
    if len(findings) > _NAMED:
        axes.set_ylabel("tensor, in the order of the table")
        return
    # Dollar signs would be read as formulas.
    labels = [shown(finding.name).replace("$", r"\$")[-48:] for finding in findings]
    axes.set_yticks(range(len(findings)), labels, fontsize=7)
    for label, each in zip(axes.get_yticklabels(), advice, strict=True):
        if each.reason is not None:
            label.set_color("#b03030")


def _or_nan(number: float | None) -> float:
    return math.nan if number is None or math.isinf(number) else number
