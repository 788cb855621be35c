"""Checks that several calls make of their arguments."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from squinchcomm.arrays import Flat, flatten
from squinchcomm.kernels.dtypes import dtype_name


def same_dtype(first: Flat, second: Flat) -> None:
    """Raises TypeError unless both have one element type."""
    if first.data.dtype != second.data.dtype:
        raise TypeError(f"input and output differ in dtype: {dtype_name(first.data.dtype)}, {dtype_name(second.data.dtype)}")


def part_sizes(counts: Sequence[int] | None, ranks: int, total: int, whole: str) -> list[int]:
    """Elements of each rank's part of the array called `whole`, which has `total`: `counts`, or equal parts if None."""
    if counts is None:
        if total % ranks:
            raise ValueError(f"{whole} has {total} elements, which {ranks} ranks cannot share equally; give counts")
        return [total // ranks] * ranks
    parts = [operator.index(count) for count in counts]
    if len(parts) != ranks or min(parts) < 0 or sum(parts) != total:
        raise ValueError(
            f"counts {parts} must be {ranks} numbers, none negative, that add up to the {total} elements of {whole}"
        )
    return parts


def check_part(part: Flat, name: str, parts: Sequence[int], rank: int, whole: str) -> None:
    """Raises ValueError unless the array called `name` has the size of this rank's part."""
    if parts[rank] != part.data.size:
        raise ValueError(f"{name} has {part.data.size} elements where rank {rank}'s part of {whole} has {parts[rank]}")


def check_overlap(source: Flat, target: Flat, slot: slice | None, whole: str) -> None:
    """Raises ValueError if input and output share memory in any way but the one that works: the smaller is `slot` of the larger.

    Args:
        source: The input.
        target: The output.
        slot: This rank's place in the array called `whole`, "input" or "output"; None if no overlap works.
    """
    if not np.may_share_memory(source.data, target.data):
        return
    large, small = (source, target) if whole == "input" else (target, source)
    if slot is None or large.data[slot].__array_interface__["data"] != small.data.__array_interface__["data"]:
        place = "pass separate arrays" if slot is None else f"only this rank's own part of {whole} may be the other array"
        raise ValueError(f"input and output overlap; {place}")


def on_root(array: Any, name: str, part: Flat, ranks: int, *, writable: bool) -> Flat:
    """The root's array of all ranks' parts, each of the size of `part`."""
    if array is None:
        raise ValueError(f"{name} must be given on the root")
    flat = flatten(array, name, writable=writable)
    same_dtype(part, flat)
    if flat.data.size != part.data.size * ranks:
        raise ValueError(
            f"{name} has {flat.data.size} elements; {ranks} ranks of {part.data.size} each need {part.data.size * ranks}"
        )
    return flat
