"""What the demo shows at its end: a table and a picture, from the runs that rank 0 wrote."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from statistics import median

from rich.table import Table

from squinchcomm.demo.records import Run

# With squinch6, gaps of 0.0002 to 0.016 were seen after 60 to 300 steps with three seeds; a codec that breaks training is far outside.
LOSS_TOLERANCE = 0.05  # nats a byte, held-out
_COLOURS = ("#8a5a00", "#0b6fb8", "#2a7f3f", "#7a3fa0")
_FIRST_SHOWN_STEP = 20  # losses of the steps before would squeeze all that differs into the bottom of the picture
_STYLES = (("-", 3.0), ("--", 1.5), ("-.", 1.5), (":", 1.5))  # curves that lie on each other stay visible


def label(codec: str) -> str:
    """How a codec is called in front of users."""
    return "float32" if codec == "none" else codec


def problems(runs: list[Run]) -> list[str]:
    """What should not be: ranks that differ, or a run whose held-out loss is off the first one's by more than the tolerance."""
    found = [f"{label(run.codec)}: ranks hold different parameters" for run in runs if not run.ranks_agree]
    for run in runs[1:]:
        gap = run.held_out_loss[-1][1] - runs[0].held_out_loss[-1][1]
        if not abs(gap) <= LOSS_TOLERANCE:
            found.append(
                f"{label(run.codec)}: held-out loss differs from {label(runs[0].codec)} by {gap:+.4f} > {LOSS_TOLERANCE}"
            )
    return found


def table(runs: list[Run], *, ranks: int, link_rate: str) -> Table:
    """A row a quantity, a column a run, and how the last run compares with the first."""
    first = runs[0]
    title = f"ranks: {ranks}, links: {link_rate}, {first.parameters / 1e6:.2f} M parameters, {len(first.train_loss)} steps taken in turns"
    shown = Table(title=title, title_justify="left")
    shown.add_column("a step: median; a rank: rank 0")
    for run in runs:
        shown.add_column(label(run.codec), justify="right")
    shown.add_column("ratio", justify="right")

    def row(name: str, values: list[float], form: str, *, compare: bool = True) -> None:
        ratio = f"{values[0] / values[-1]:.2f}x" if compare and values[-1] else ""
        shown.add_row(name, *(form.format(value) for value in values), ratio)

    row("step time (ms)", [1e3 * median(map(sum, zip(r.compute_s, r.communication_s, strict=True))) for r in runs], "{:.1f}")
    row("  compute (ms)", [1e3 * median(r.compute_s) for r in runs], "{:.1f}")
    row("  waiting for gradients (ms)", [1e3 * median(r.communication_s) for r in runs], "{:.1f}")
    row("sent on the wire, a rank and step (MB)", [median(r.wire_bytes) / 1e6 for r in runs], "{:.3f}")
    row("training time (s)", [sum(r.compute_s) + sum(r.communication_s) for r in runs], "{:.1f}")
    row(
        "train loss, last 20 steps (nats/byte)",
        [sum(r.train_loss[-20:]) / len(r.train_loss[-20:]) for r in runs],
        "{:.4f}",
        compare=False,
    )
    row("held-out loss (nats/byte)", [r.held_out_loss[-1][1] for r in runs], "{:.4f}", compare=False)
    shown.add_row("all ranks bit-identical", *("yes" if run.ranks_agree else "NO" for run in runs), "")
    return shown


def _loss_limits(runs: list[Run]) -> tuple[float, float]:
    """Lowest and highest loss to show: all from step 20 on, or all if there are hardly more steps."""
    first = _FIRST_SHOWN_STEP if len(runs[0].train_loss) > 2 * _FIRST_SHOWN_STEP else 0
    shown = [loss for run in runs for loss in run.train_loss[first:]]
    shown += [loss for run in runs for step, loss in run.held_out_loss if step > first]
    margin = 0.05 * (max(shown) - min(shown)) or 0.05
    return min(shown) - margin, max(shown) + margin


def picture(runs: list[Run], path: Path, *, ranks: int, link_rate: str) -> None:
    """Writes a PNG: losses against steps, losses against time, bytes on the wire against time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time, wire) = pyplot.subplots(1, 3, figsize=(16, 5), layout="constrained")
    longest_s = max(sum(run.compute_s) + sum(run.communication_s) for run in runs)
    for run, colour, (style, width) in zip(runs, _COLOURS, _STYLES, strict=False):
        name = label(run.codec)
        clock = list(accumulate(map(sum, zip(run.compute_s, run.communication_s, strict=True))))
        steps = range(1, len(clock) + 1)
        evaluated = [step for step, _ in run.held_out_loss]
        held_out = [loss for _, loss in run.held_out_loss]
        for axes, train_x, held_out_x in (
            (by_step, steps, evaluated),
            (by_time, clock, [clock[step - 1] for step in evaluated]),
        ):
            axes.plot(
                held_out_x,
                held_out,
                color=colour,
                linestyle=style,
                linewidth=width,
                marker="o",
                markersize=4,
                zorder=3,
                label=f"{name}, held-out",
            )
            axes.plot(train_x, run.train_loss, color=colour, alpha=0.25, linewidth=0.6, zorder=2, label=f"{name}, training")
        sent = [total / 1e9 for total in accumulate(run.wire_bytes)]
        wire.plot(clock, sent, color=colour, linewidth=2, label=name)
        alone = not sent[-1]  # one rank sends nothing
        less = "" if run is runs[0] or alone else f", {sum(runs[0].wire_bytes) / sum(run.wire_bytes):.1f}x less"
        # Above the end of the line, and away from the nearer edge.
        side = "right" if clock[-1] > longest_s / 2 else "left"
        wire.annotate(
            f"{sent[-1]:.3g} GB{less}", (clock[-1], sent[-1]), (0, 4), textcoords="offset points", ha=side, color=colour
        )
    for axes, title, x, y in (
        (by_step, "Loss by step", "optimizer step", "loss (nats per byte)"),
        (by_time, "Loss by time", "training time (s)", "loss (nats per byte)"),
        (wire, "Bytes on the wire", "training time (s)", "sent by one rank since the start (GB)"),
    ):
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    wire.legend(frameon=False, loc="upper left")
    wire.set_ylim(0, 1.1 * wire.get_ylim()[1])
    for axes in (by_step, by_time):
        axes.set_ylim(*_loss_limits(runs))
    figure.suptitle(
        f"Byte-level transformer, {runs[0].parameters / 1e6:.2f} M parameters, ranks: {ranks}, emulated links: {link_rate}",
        fontsize=13,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
