"""The frame header: what every frame says about itself, checked before its payload is used.

Layout, little-endian, 60 bytes:

| bytes | field |
|---|---|
| 0..3 | magic "SQNC" |
| 4 | wire version |
| 5 | kind: data, error, announce, clear, refuse, ballot |
| 6..10 | operation, reduction, dtype, codec, codec version |
| 11 | number of dimensions, 0 if the shape does not matter |
| 12..15 | root rank, or tag |
| 16..19 | epoch of the communicator |
| 20..23 | CRC32C of the shape, or of the sizes of the ranks' parts |
| 24..31 | sequence number |
| 32..39 | elements in the whole array |
| 40..43 | index of this frame among all between the two ranks |
| 44..47 | phase (upper 4 bits) and chunk |
| 48..51 | payload bytes |
| 52..55 | CRC32C of the payload: computed once for a payload that goes to many; 0 for one in shared memory |
| 56..59 | CRC32C of bytes 0..55 |

Bytes 0..39 are the same in all frames of one collective, so the usual check is one comparison of bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from squinchcomm.kernels.dtypes import BFLOAT16

MAGIC = b"SQNC"
WIRE_VERSION = 1

DATA, ERROR, ANNOUNCE, CLEAR, REFUSE, BALLOT = range(6)
OPS = (
    "barrier",
    "allreduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send",
)
REDUCTIONS = ("", "sum", "avg", "min", "max", "product", "band", "bor", "bxor", "premul_sum")
DTYPES = tuple(
    np.dtype(name)
    for name in ("bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 complex128".split())
) + (BFLOAT16,)
OP_CODES = {name: code for code, name in enumerate(OPS)}
REDUCTION_CODES = {name: code for code, name in enumerate(REDUCTIONS)}
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

_SIGNATURE = struct.Struct("<4sBBBBBBBBIIIQQ")
_TAIL = struct.Struct("<IIII")
_CRC = struct.Struct("<I")
SIGNATURE_BYTES = _SIGNATURE.size
HEADER_BYTES = SIGNATURE_BYTES + _TAIL.size + _CRC.size
MAX_CHUNK = 1 << 28
KIND_BYTE = 5


@dataclass(frozen=True, slots=True)
class Signature:
    """What two ranks must agree on before they use each other's data. Codes index the tables above."""

    op: str
    reduction: str = ""
    dtype: np.dtype | None = None
    count: int = 0
    shape: tuple[int, ...] | None = None
    parts: tuple[int, ...] | None = None  # elements of each rank's part, in calls that cut the array
    root: int = 0
    codec_id: int = 0
    codec_version: int = 1
    kind: int = DATA

    def pack(self, epoch: int, sequence: int) -> bytes:
        """Bytes 0..39 of the header."""
        return _SIGNATURE.pack(
            MAGIC,
            WIRE_VERSION,
            self.kind,
            OP_CODES[self.op],
            REDUCTION_CODES[self.reduction],
            255 if self.dtype is None else DTYPE_CODES[self.dtype],
            self.codec_id,
            self.codec_version,
            0 if self.shape is None else min(len(self.shape), 255),
            self.root,
            epoch,
            0 if self.shape is None and self.parts is None else google_crc32c.value(repr((self.shape, self.parts)).encode()),
            sequence,
            self.count,
        )


@dataclass(frozen=True, slots=True)
class Header:
    """A header in the clear, read when bytes 0..39 are not the ones expected."""

    magic: bytes
    version: int
    kind: int
    op: int
    reduction: int
    dtype: int
    codec_id: int
    codec_version: int
    ndim: int
    root: int
    epoch: int
    shape_crc: int
    sequence: int
    count: int

    def describe(self, codec_name: Any = str) -> str:
        """The call in words, such as `allreduce #12 (sum, float32, 1000 elements, codec squinch6)`."""
        parts = []
        if self.reduction:
            parts.append(_name(REDUCTIONS, self.reduction))
        if self.dtype != 255:
            dtype = DTYPES[self.dtype] if self.dtype < len(DTYPES) else None
            parts.append("bfloat16" if dtype == BFLOAT16 else dtype.name if dtype is not None else f"dtype {self.dtype}?")
            parts.append(f"{self.count} elements")
        if self.ndim:
            parts.append(f"{self.ndim}-d shape with checksum {self.shape_crc:08x}")
        elif self.shape_crc:
            parts.append(f"parts with checksum {self.shape_crc:08x}")
        op = _name(OPS, self.op)
        if op in ("broadcast", "reduce", "gather", "scatter"):
            parts.append(f"root {self.root}")
        if self.codec_id:
            parts.append(f"codec {codec_name(self.codec_id)} v{self.codec_version}")
        elif self.reduction:
            parts.append("lossless")
        return f"{op} #{self.sequence}" + (f" ({', '.join(parts)})" if parts else "")


def _name(table: tuple[str, ...], code: int) -> str:
    return table[code] if code < len(table) else f"{code}?"


def read_header(signature: bytes) -> Header:
    """Splits bytes 0..39; the caller judges the fields."""
    return Header(*_SIGNATURE.unpack_from(signature))


def payload_crc(payload: Any) -> int:
    """CRC32C of a payload, a contiguous uint8 array or bytes."""
    crc: int = google_crc32c.value(payload)
    return crc


def frame_header(signature: bytes, index: int, phase: int, chunk: int, nbytes: int, crc: int) -> bytes:
    """The 60 bytes that go before a payload of `nbytes` bytes whose checksum is `crc`."""
    head = signature + _TAIL.pack(index & 0xFFFFFFFF, phase << 28 | chunk, nbytes, crc)
    return head + _CRC.pack(google_crc32c.value(head))


def check_frame(header: bytes, payload: np.ndarray, index: int, *, in_place: bool = False) -> str | None:
    """What is wrong with the frame as bytes, or None. A payload that is read in place has no checksum."""
    if len(header) != HEADER_BYTES:
        return f"header of {len(header)} bytes instead of {HEADER_BYTES}"
    if google_crc32c.value(header[:-4]) != _CRC.unpack_from(header, HEADER_BYTES - 4)[0]:
        return "checksum mismatch in the header"
    got_index, _, nbytes, crc = _TAIL.unpack_from(header, SIGNATURE_BYTES)
    if nbytes != payload.size:
        return f"payload of {payload.size} bytes where the header says {nbytes}"
    if not in_place and crc != payload_crc(payload):
        return "checksum mismatch in the payload"
    if got_index != index & 0xFFFFFFFF:
        return f"frame {got_index} where frame {index & 0xFFFFFFFF} was due (lost, repeated or reordered)"
    return None


def is_intact(header: bytes, payload: np.ndarray, *, in_place: bool) -> bool:
    """Whether a frame is undamaged, whatever its place among others."""
    if len(header) != HEADER_BYTES:
        return False
    index: int = _TAIL.unpack_from(header, SIGNATURE_BYTES)[0]
    return check_frame(header, payload, index, in_place=in_place) is None


def frame_part(header: bytes) -> tuple[int, int]:
    """(phase, chunk) of a checked header."""
    part: int = _TAIL.unpack_from(header, SIGNATURE_BYTES)[1]
    return part >> 28, part & (MAX_CHUNK - 1)
