"""Scaling curves as a picture: time and bus bandwidth against ranks, time against size, for each algorithm and codec."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from squinchcomm.cli.simulate_table import OURS, Row, World
from squinchcomm.cost import RING, Layout
from squinchcomm.machine import CodecCost

_COLOURS = ("#8a5a00", "#0b6fb8", "#2a7f3f", "#7a3fa0", "#b03030")
_STYLES = {"pairwise": "-", "hierarchical": "--", "direct": ":"}


def plot(path: Path, world: World, layout: Layout, link_bits_per_s: float, codecs: list[CodecCost], sizes: list[int]) -> None:
    """Writes a PNG about `layout` and smaller worlds with as many ranks a host, on one kind of link.

    Args:
        path: The file.
        world: Constants and element type.
        layout: The largest world.
        link_bits_per_s: Of a host.
        codecs: A colour each.
        sizes: Bytes, for the curves against size; the largest one is that of the curves against ranks.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (scaling, bandwidth, by_size) = pyplot.subplots(1, 3, figsize=(17, 5), layout="constrained")
    layouts = growing(layout)
    for index, codec in enumerate(codecs):
        row, colour = partial(world.row, link_bits_per_s=link_bits_per_s, codec=codec), _COLOURS[index % len(_COLOURS)]
        grown = [row(each, size=sizes[-1]) for each in layouts]
        ranks = [each.ranks for each in layouts]
        _curves(scaling, ranks, grown, colour)
        bandwidth.plot(ranks, [each.busbw for each in grown], color=colour, marker=".", label=codec.name)
        compressed = [size for size in sizes if codec.lossless or size >= world.min_compress_bytes] or sizes[-1:]
        _curves(by_size, compressed, [row(layout, size=size) for size in compressed], colour)
    _finish(scaling, f"{sizes[-1]:,} bytes", "ranks", "time (ms)")
    _finish(bandwidth, f"{sizes[-1]:,} bytes, fastest algorithm", "ranks", "bus bandwidth (GB/s, uncompressed)")
    _finish(by_size, f"{layout.ranks} ranks on {layout.hosts} hosts", "size (bytes)", "time (ms)")
    link = f"{link_bits_per_s / 1e9:g} Gb/s a host"
    figure.suptitle(f"All-reduce of {world.dtype}, predicted: {link}, {layout.most} ranks a host")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def growing(layout: Layout) -> list[Layout]:
    """Worlds of 1, 2, 4 ... hosts, as full as the fullest of `layout`, then `layout` itself; none of a single rank."""
    hosts = [1 << power for power in range(layout.hosts.bit_length()) if 1 << power < layout.hosts]
    smaller = [Layout.even(count * layout.most, count) for count in hosts]
    return [*(each for each in smaller if 1 < each.ranks < layout.ranks), layout]


def _curves(axes: Any, xs: list[int], rows: list[Row], colour: str) -> None:
    """A curve for each algorithm that can run, where it can, and a grey one for the ring."""
    for name in OURS:
        points = [
            (x, each.predictions[name].time_s * 1e3) for x, each in zip(xs, rows, strict=True) if name in each.predictions
        ]
        if points:
            axes.plot(*zip(*points, strict=True), _STYLES[name], color=colour, marker=".", label=f"{rows[0].codec}, {name}")
    known = {line.get_label() for line in axes.get_lines()}
    if "ring, lossless" not in known:
        axes.plot(xs, [each.predictions[RING].time_s * 1e3 for each in rows], "-.", color="#777777", label="ring, lossless")


def _finish(axes: Any, title: str, x: str, y: str) -> None:
    axes.set(title=title, xlabel=x, ylabel=y, yscale="log")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False, fontsize=8)
