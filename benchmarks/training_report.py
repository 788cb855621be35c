"""From raw results of the training benchmark to tables, a report and a picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean
from typing import Any

import links_report
import netns
import numpy as np
from training_contenders import BASE, CONTENDERS, HALF

# Largest error of the averaged gradients, relative to the norm of the float32 ones. PowerSGD keeps only a low rank, and pays back later.
_ERROR_BOUND = {BASE: 1e-6, HALF: 2e-2, "powersgd": 1.5, "hook-sr": 0.2}
_SIX_BITS = 0.12
TOLERANCE = 0.003  # of the base's loss, in the mean of three seeds or more
_ROUGH_TOLERANCE = 0.02  # of fewer seeds: their losses differ by chance
_SEEDS = 3
_RESAMPLES = 2000
_THEIRS = (BASE, HALF, "powersgd")
_SHOWN_GAP = 0.01


@dataclass(frozen=True)
class StepRow:
    """One contender's steps. Seconds are medians over rounds of the slowest rank's; ratios are of medians, with 95 % intervals."""

    contender: str
    rounds: int
    step_s: float
    compute_s: float
    communication_s: float
    sent_bytes: float  # a rank and step
    speedup: dict[str, tuple[float, float, float]]  # of communication, over each baseline
    error: float
    ok: bool


@dataclass(frozen=True)
class LossRow:
    """One contender's trainings: held-out loss of each seed, nats a byte, and its distance from the base with the same seed."""

    contender: str
    losses: dict[int, float]
    gaps: dict[int, float]  # relative to the base
    ok: bool

    @property
    def gap(self) -> float:
        """Mean over the seeds of the loss against the mean of the base."""
        return mean(self.gaps.values()) if self.gaps else float("nan")


def step_rows(records: list[dict[str, Any]]) -> list[StepRow]:
    """A row a contender, out of the last check and all rounds."""
    rounds = [record["ranks"] for record in records if record["kind"] == "round"]
    if not rounds:
        return []
    checks = next(record["ranks"] for record in records if record["kind"] == "check")
    names = records[-1]["settings"]["contenders"]
    slowest = {name: np.array([np.max([rank[name][:2] for rank in ranks], axis=0) for ranks in rounds]) for name in names}
    gaps = {name: times[:, 0] - times[:, 1] for name, times in slowest.items()}
    rows = []
    for name in names:
        found = [check["checks"][name] for check in checks]
        error = max(check["error"] for check in found)
        same = len({check["digest"] for check in found}) == 1
        rows.append(
            StepRow(
                contender=name,
                rounds=len(rounds),
                step_s=float(np.median(slowest[name][:, 0])),
                compute_s=float(np.median(slowest[name][:, 1])),
                communication_s=float(np.median(gaps[name])),
                sent_bytes=float(np.median([mean(rank[name][2] for rank in ranks) for ranks in rounds])),
                speedup={base: _speedup(gaps[base], gaps[name]) for base in (BASE, HALF) if base in gaps},
                error=error,
                ok=same and error <= _ERROR_BOUND.get(name, _SIX_BITS),
            )
        )
    return rows


def _speedup(base: np.ndarray, ours: np.ndarray) -> tuple[float, float, float]:
    """Ratio of the medians, and the interval that holds it in 95 % of bootstrap samples of whole rounds."""
    picks = np.random.default_rng(0).integers(0, len(base), size=(_RESAMPLES, len(base)))
    low, high = np.percentile(np.median(base[picks], axis=1) / np.median(ours[picks], axis=1), (2.5, 97.5))
    return float(np.median(base) / np.median(ours)), float(low), float(high)


def loss_rows(trainings: list[dict[str, Any]]) -> list[LossRow]:
    """A row a contender; `ok` if ranks never differed and the mean is as near to the base's as the tolerance says."""
    losses: dict[str, dict[int, float]] = {}
    for record in trainings:
        losses.setdefault(record["contender"], {})[record["seed"]] = record["held_out_loss"]
    base = losses.get(BASE, {})
    tolerance = TOLERANCE if len(base) >= _SEEDS else _ROUGH_TOLERANCE
    rows = []
    for name, found in losses.items():
        gaps = {seed: loss / base[seed] - 1 for seed, loss in found.items() if seed in base}
        same = all(record["identical"] for record in trainings if record["contender"] == name)
        near = name in _THEIRS or not gaps or abs(mean(gaps.values())) <= tolerance
        rows.append(LossRow(name, found, gaps, same and near))
    return rows


def round_line(number: int, rounds: int, answers: list[dict[str, list[float]]]) -> str:
    """Progress."""
    times = {name: np.max([rank[name][:2] for rank in answers], axis=0) for name in answers[0]}
    each = ", ".join(f"{name} {1e3 * (times[name][0] - times[name][1]):.0f}" for name in sorted(times))
    return f"round {number}/{rounds}: communication (ms): {each}"


def training_line(contender: str, seed: int, record: dict[str, Any]) -> str:
    """Progress."""
    same = "ranks identical" if record["identical"] else "RANKS DIFFER"
    return f"{contender:<14} seed {seed}: held-out loss {record['held_out_loss']:.4f} after {record['seconds']:.0f} s, {same}"


def tables(steps: list[StepRow], losses: list[LossRow]) -> list[str]:
    """Both tables in Markdown."""
    lines = []
    if steps:
        lines += [
            "| contender | step (ms) | without averaging | communication | sent (MB) | x gloo-f32 [95 %] | x gloo-bf16 [95 %] | error | |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for row in steps:
            ratios = ["{:.2f} [{:.2f}..{:.2f}]".format(*row.speedup[b]) if b in row.speedup else "" for b in (BASE, HALF)]
            times = " | ".join(f"{1e3 * value:.0f}" for value in (row.step_s, row.compute_s, row.communication_s))
            lines.append(
                f"| {row.contender} | {times} | {row.sent_bytes / 1e6:.1f} | {ratios[0]} | {ratios[1]} | {row.error:.1e} "
                f"| {'' if row.ok else 'WRONG'} |"
            )
    if losses:
        seeds = sorted({seed for row in losses for seed in row.losses})
        heads = " | ".join(f"seed {seed}" for seed in seeds)
        lines += [
            "",
            f"| contender | {heads} | mean | against {BASE}, mean | each seed | |",
            "|---|" + "---|" * (len(seeds) + 4),
        ]
        for each in losses:
            values = " | ".join(f"{each.losses[seed]:.4f}" if seed in each.losses else "" for seed in seeds)
            gaps = " ".join(f"{100 * gap:+.2f}" for gap in each.gaps.values())
            lines.append(
                f"| {each.contender} | {values} | {mean(each.losses.values()):.4f} | {100 * each.gap:+.2f} % | {gaps} "
                f"| {'' if each.ok else 'OFF'} |"
            )
    return lines


def write(
    folder: Path,
    steps: list[StepRow],
    losses: list[LossRow],
    rounds: list[dict[str, Any]],
    trainings: list[dict[str, Any]],
) -> Path:
    """Writes `training-DATE.md`, with raw results in JSON and a picture beside it. Returns its path."""
    shaped = f"network namespaces, veth, tbf on both ends, MTU {netns.MTU}"
    machine = links_report.environment(shaped, script="training.py")
    folder.mkdir(parents=True, exist_ok=True)
    name = f"training-{datetime.fromisoformat(machine['date']).strftime('%Y-%m-%d-%H%M')}"
    raw = {"machine": machine, "rounds": rounds, "trainings": trainings}
    (folder / f"{name}.json").write_text(json.dumps(raw) + "\n")
    picture(folder / f"{name}.png", steps, losses)
    text = [
        f"# Training over slow links, {machine['date']}",
        "",
        f"Command: `{machine['command']}`. Raw results: [{name}.json]({name}.json).",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}, Python "
        f"{machine['python']}; {', '.join(f'{key} {value}' for key, value in machine['versions'].items())}.",
        "",
        f"![step times and losses]({name}.png)",
        "",
        *_explained(rounds, trainings),
        "",
        *tables(steps, losses),
        "",
        "Contenders:",
        "",
        *(
            f"- `{key}`: {CONTENDERS[key].text}"
            for key in dict.fromkeys([*(r.contender for r in steps), *(r.contender for r in losses)])
        ),
        "",
    ]
    path = folder / f"{name}.md"
    path.write_text("\n".join(text))
    return path


def _explained(rounds: list[dict[str, Any]], trainings: list[dict[str, Any]]) -> list[str]:
    lines = []
    if rounds:
        size = rounds[0]["ranks"][0]["parameters"]
        setting = rounds[0]["settings"]
        lines += [
            f"**Steps**: {setting['ranks']} ranks, {setting['gbit']:g} Gb/s links, {shape_text(size, setting)}, one thread a rank, "
            f"links: {netns.MTU} byte frames. A step is forward and backward with {_ddp_text(setting['ddp'])}; communication "
            "is its time less that of the same step under `no_sync`, taken right after it. Medians over rounds in which contenders "
            "take turns, of the slowest rank. `error`: of the averaged gradients against float32, relative; WRONG if it exceeds the "
            "codec's bound or ranks differ in a bit. All ranks share the machine's cores, with each other and with the codec.",
            "",
        ]
    if trainings:
        setting = trainings[0]["settings"]
        lines += [
            f"**Losses**: {setting['steps']} steps of AdamW, cosine to 0 from {setting['learning_rate']:g}, {setting['ranks']} ranks, "
            f"{shape_text(None, setting)}, on the sources of Python's standard library; loss in nats a byte over all held-out files. "
            f"The same seed gives all contenders the same start and the same batches. OFF if the mean differs from {BASE} by more than "
            f"{100 * TOLERANCE:g} % ({100 * _ROUGH_TOLERANCE:g} % with fewer than {_SEEDS} seeds), or if ranks ended with different "
            "parameters; PyTorch's hooks are not judged. PowerSGD starts after a tenth of the steps.",
        ]
    return lines


def _ddp_text(setting: dict[str, Any]) -> str:
    """DDP's settings in words."""
    changed = [f"{name}={value}" for name, value in setting.items() if value]
    return f"DDP and {', '.join(changed)}" if changed else "DDP as torch sets it up"


def shape_text(parameters: int | None, setting: dict[str, Any]) -> str:
    """The model and its batch in words."""
    size = "" if parameters is None else f"{parameters / 1e6:.1f} M parameters, "
    return (
        f"byte-level transformer of {size}{setting['layers']} layers, width {setting['width']}, "
        f"{setting['batch']} x {setting['length']} tokens a rank and step"
    )


def picture(path: Path, steps: list[StepRow], losses: list[LossRow]) -> None:
    """Step times as bars, and each seed's loss against the base's as dots; what was not measured is left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawings: list[tuple[Any, Any]] = [(draw, rows) for draw, rows in ((_draw_steps, steps), (_draw_losses, losses)) if rows]
    size = (6.5 * len(drawings), 4.5)
    figure, panels = pyplot.subplots(1, len(drawings), figsize=size, layout="constrained", squeeze=False)
    for axes, (draw, rows) in zip(panels[0], drawings, strict=True):
        draw(axes, rows)
        axes.invert_yaxis()
        axes.grid(alpha=0.25, axis="x")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_steps(axes: Any, rows: list[StepRow]) -> None:
    for row in rows:
        compute, communication = 1e3 * row.compute_s, 1e3 * row.communication_s
        axes.barh(row.contender, compute, color="#b9b9b9")
        axes.barh(row.contender, communication, left=compute, color="#8a5a00" if row.contender in _THEIRS else "#0b6fb8")
        speedup = f"  {row.speedup[BASE][0]:.1f}x" if BASE in row.speedup and row.contender != BASE else ""
        axes.annotate(f" {communication:.0f} ms{speedup}", (compute + communication, row.contender), va="center", fontsize=9)
    axes.set(title="DDP step", xlabel="ms: forward and backward (grey), and what communication adds to it")
    axes.margins(x=0.3)


def _draw_losses(axes: Any, rows: list[LossRow]) -> None:
    axes.axvspan(-100 * TOLERANCE, 100 * TOLERANCE, color="#2a7f3f", alpha=0.12, label=f"within {100 * TOLERANCE:g} %")
    axes.axvline(0, color="black", linewidth=0.8)
    for row in rows:
        gaps = [100 * gap for gap in row.gaps.values()]
        axes.plot(gaps, [row.contender] * len(gaps), "o", color="#0b6fb8", alpha=0.6, markersize=5)
        axes.plot([100 * row.gap], [row.contender], "|", color="black", markersize=18)
        if abs(row.gap) > _SHOWN_GAP:
            edge = 85 * _SHOWN_GAP * (1 if row.gap > 0 else -1)
            axes.annotate(f"{100 * row.gap:+.1f} %", (edge, row.contender), ha="center", va="center")
    axes.set(title="Held-out loss against float32 all-reduce", xlabel="% (dots: seeds, line: their mean)")
    axes.set_xlim(-100 * _SHOWN_GAP, 100 * _SHOWN_GAP)
    axes.legend(frameon=False, loc="lower left")
