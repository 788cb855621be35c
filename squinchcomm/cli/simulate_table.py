"""The lines of `squinchcomm simulate`: predictions for every world, link, codec and size, in the style of `squinchcomm bench`."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from squinchcomm import __version__
from squinchcomm.cost import DIRECT, HIERARCHICAL, PAIRWISE, RING, Layout, Prediction, algorithms, choose, predict
from squinchcomm.errors import ConfigError
from squinchcomm.machine import CodecCost, Machine, codec_cost

OURS = (DIRECT, PAIRWISE, HIERARCHICAL)
_FOR_EVER_S = 1e12
_COLUMNS = (
    # heading, unit, width
    ("ranks", "", 7),
    ("hosts", "", 7),
    ("link", "(Gb/s)", 7),
    ("size", "(B)", 11),
    ("type", "", 9),
    ("codec", "", 12),
    *((name, "(us)", 12) for name in OURS),
    ("choice", "", 12),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("wire", "(B/host)", 13),
    ("bound", "", 10),
    ("ring", "(us)", 12),
    ("speed", "(x ring)", 8),
)


@dataclass(frozen=True)
class World:
    """What all cases have in common.

    Attributes:
        machine: Constants; each case has a link of its own.
        dtype: Element type.
        itemsize: Its bytes.
        min_compress_bytes: Arrays smaller than this go lossless, as they do in a run.
    """

    machine: Machine
    dtype: str
    itemsize: int
    min_compress_bytes: int

    def row(self, layout: Layout, link_bits_per_s: float, codec: CodecCost, size: int) -> Row:
        """The predictions of one case, of two ranks or more, for an array that is compressed if `codec` does."""
        machine = replace(self.machine, link_bits_per_s=link_bits_per_s)
        half = self.itemsize == 2
        found = {
            name: predict(name, layout, size, codec, machine, itemsize=self.itemsize)
            for name in (*algorithms(layout, size, codec, half=half), RING)
        }
        choice = choose(layout, size, codec, machine, itemsize=self.itemsize, half=half)
        if not all(each.time_s < _FOR_EVER_S for each in found.values()):
            raise ConfigError(f"{size} bytes take for ever with these constants: give smaller times, or higher rates")
        return Row(layout, link_bits_per_s, codec.name, self.dtype, size, found, choice.algorithm)


@dataclass(frozen=True)
class Row:
    """Predictions for one case, by algorithm: those that can run, and the ring for comparison."""

    layout: Layout
    link_bits_per_s: float
    codec: str
    dtype: str
    size: int
    predictions: dict[str, Prediction]
    choice: str

    @property
    def chosen(self) -> Prediction:
        """Of the algorithm chosen."""
        return self.predictions[self.choice]

    @property
    def algbw(self) -> float:
        """Uncompressed bytes per time, GB/s."""
        return self.size / self.chosen.time_s / 1e9

    @property
    def busbw(self) -> float:
        """Algbw as links would see it if nothing were compressed, GB/s."""
        return self.algbw * 2 * (self.layout.ranks - 1) / self.layout.ranks

    @property
    def speed(self) -> float:
        """Time of the ring over that of the choice."""
        return self.predictions[RING].time_s / self.chosen.time_s

    def as_json(self) -> dict[str, Any]:
        """All of it, derived numbers included."""
        derived = {
            "algbw_GBps": self.algbw,
            "busbw_GBps": self.busbw,
            "bound": self.chosen.bound,
            "speed_over_ring": self.speed,
        }
        return asdict(self) | {"time_s": self.chosen.time_s, "wire_bytes": self.chosen.wire_bytes} | derived

    def __str__(self) -> str:
        cells = (
            str(self.layout.ranks),
            str(self.layout.hosts),
            f"{self.link_bits_per_s / 1e9:g}",
            str(self.size),
            self.dtype,
            self.codec,
            *(_us(self.predictions.get(name)) for name in OURS),
            self.choice,
            f"{self.algbw:.3f}",
            f"{self.busbw:.3f}",
            f"{self.chosen.wire_bytes:.0f}",
            self.chosen.bound,
            _us(self.predictions[RING]),
            f"{self.speed:.2f}",
        )
        return " ".join(cell.rjust(width) for cell, (_, _, width) in zip(cells, _COLUMNS, strict=True))


def rows(
    world: World, layouts: list[Layout], link_rates: list[float], codecs: list[CodecCost], sizes: list[int]
) -> Iterator[Row]:
    """A row for each layout, link, size and codec, in this order. Where a codec does not apply yet, the lossless row comes once."""
    lossless = codec_cost("none")
    for layout in layouts:
        for rate in link_rates:
            for size in sizes:
                small = size < world.min_compress_bytes
                for codec in dict.fromkeys(lossless if small or codec.lossless else codec for codec in codecs):
                    yield world.row(layout, rate, codec, size)


def facts(machine: Machine, codecs: list[CodecCost], source: str) -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": ["squinchcomm", *sys.argv[1:]],
        "version": __version__,
        "source": source,
        "machine": asdict(machine),
        "codecs": [asdict(codec) for codec in codecs],
    }


def header(known: dict[str, Any]) -> list[str]:
    """Lines above the rows."""
    machine = known["machine"]
    titles = " ".join(title.rjust(width) for title, _, width in _COLUMNS)
    units = " ".join(unit.rjust(width) for _, unit, width in _COLUMNS)
    return [
        f"# squinchcomm simulate  {known['date']}  squinchcomm {known['version']}",
        f"# constants {known['source']}: latency {1e6 * machine['latency_s']:g} us ({1e6 * machine['local_latency_s']:g} inside a host), "
        f"{machine['cores']:g} cores a host",
        f"# processor time: a hop {1e6 * machine['call_s']:g} us, a frame {1e6 * machine['frame_s']:g} us "
        f"({1e6 * machine['local_frame_s']:g} inside a host), its chunk {1e6 * machine['chunk_s']:g} us "
        f"({1e6 * machine['encoded_chunk_s']:g} encoded)",
        f"# sockets {machine['socket_bytes_per_s'] / 1e9:.3g} GB/s a core, additions {machine['add_bytes_per_s'] / 1e9:.3g} GB/s a core, "
        f"memory {machine['memory_bytes_per_s'] / 1e9:.3g} GB/s a host, MTU {machine['mtu']}, "
        f"link efficiency {machine['link_efficiency']:g}, incast {machine['incast']:g}",
        *(
            f"# {codec['name']}: encode {codec['encode_bytes_per_s'] / 1e9:.3g}, decode {codec['decode_bytes_per_s'] / 1e9:.3g}, "
            f"reduce {codec['reduce_bytes_per_s'] / 1e9:.3g} GB/s of float32 a core"
            for codec in known["codecs"]
            if not codec["lossless"]
        ),
        "# allreduce: predicted times of each algorithm that can run; link: rate of a host, which its ranks share; GB = 1e9 bytes",
        "# choice: what runs; algbw, busbw, wire, bound are its own; size is that of the uncompressed array: busbw may exceed the link",
        "# Arrays too small for codecs (SQUINCH_MIN_COMPRESS_BYTES) have one line, lossless.",
        "# wire: bytes that leave the busiest host, headers included; bound: what takes most of the time",
        "# ring: the same array, lossless, in a ring as gloo and NCCL do, its frames for free; speed = ring / choice",
        "#",
        f"#{titles[1:]}",
        f"#{units[1:]}",
    ]


def _us(prediction: Prediction | None) -> str:
    if prediction is None:
        return "-"
    time_us = prediction.time_s * 1e6
    return f"{time_us:.1f}" if time_us < 1e6 else f"{time_us:.0f}"
