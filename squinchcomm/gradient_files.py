"""Arrays in .safetensors and .npz files, read a piece at a time and never unpickled.

Both kinds end up as a `Tensor`: where its bytes lie, in row-major order or whatever order they were saved in, and how to read some of
them. Neither library reads a part of an array whose type NumPy lacks (bfloat16) or that is compressed, so the bytes are read here;
the libraries check the files and their headers.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from squinchcomm.errors import ConfigError
from squinchcomm.kernels.dtypes import BFLOAT16, FLOAT_DTYPES, canonical_dtype, dtype_name

_ZIP_MAGIC = b"PK"
_SKIP_BYTES = 1 << 20
_SAFETENSORS: dict[str, np.dtype] = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BFLOAT16}
# What np.savez makes of ml_dtypes' bfloat16: a type of which it knows the size alone. No other two-byte type ends up like this.
_NAMELESS = np.dtype("V2")


@dataclass(frozen=True)
class Tensor:
    """An array in a file.

    Attributes:
        name: As it was saved.
        dtype: In words.
        count: Elements.
        left_out: Why it cannot be a gradient that codecs take; None if it can.
        stored: Type of its bytes on disk.
        place: Offset in a .safetensors file, or the member of an .npz file.
    """

    name: str
    dtype: str
    count: int
    left_out: str | None
    stored: np.dtype
    place: int | str


class GradientFile:
    """An open file and the tensors in it, in its own order. A context manager; made by `open_gradients`."""

    def __init__(self, path: Path, tensors: list[Tensor], stream: IO[bytes], archive: zipfile.ZipFile | None) -> None:
        self.path = path
        self.tensors = tensors
        self._stream = stream
        self._archive = archive

    def spans(self, tensor: Tensor, spans: list[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Elements start to stop of `tensor` for each of the ascending `spans`: 1-D arrays of a type that codecs take.

        Raises:
            ConfigError: the file is damaged there.
        """
        with self._bytes_of(tensor) as (stream, base):
            at = 0
            for start, stop in spans:
                if self._archive is None:
                    stream.seek(base + start * tensor.stored.itemsize)
                else:
                    self._skip(stream, (start - at) * tensor.stored.itemsize, tensor)
                raw = self._read(stream, (stop - start) * tensor.stored.itemsize, tensor)
                at = stop
                yield _native(raw.view(tensor.stored))

    @contextmanager
    def _bytes_of(self, tensor: Tensor) -> Iterator[tuple[IO[bytes], int]]:
        if self._archive is None:
            yield self._stream, int(tensor.place)
            return
        with _reporting(self.path, tensor.name), self._archive.open(str(tensor.place)) as member:
            _read_npy_header(member)
            yield member, 0

    def _skip(self, stream: IO[bytes], nbytes: int, tensor: Tensor) -> None:
        while nbytes > 0:
            nbytes -= self._read(stream, min(nbytes, _SKIP_BYTES), tensor).size

    def _read(self, stream: IO[bytes], nbytes: int, tensor: Tensor) -> np.ndarray:
        with _reporting(self.path, tensor.name):
            data = stream.read(nbytes)
        if len(data) != nbytes:
            raise ConfigError(f"{self.path}: {tensor.name!r} ends too early; the file is cut off, write it again")
        return np.frombuffer(data, np.uint8)


@contextmanager
def open_gradients(path: Path) -> Iterator[GradientFile]:
    """Opens a .safetensors or .npz file, told apart by content.

    Raises:
        ConfigError: it is neither, or damaged; or it takes the safetensors library, which is not installed.
        OSError: it cannot be opened.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: {'not a file' if path.exists() else 'no such file'}; give a .safetensors or .npz file")
    with path.open("rb") as stream:
        if stream.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
            yield GradientFile(path, _safetensors(path, stream), stream, None)
            return
        with _reporting(path, None):
            archive = zipfile.ZipFile(stream)
        with archive:
            yield GradientFile(path, _npz(path, archive), stream, archive)


def _safetensors(path: Path, stream: IO[bytes]) -> list[Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ConfigError(
            f"{path} is no .npz file, and .safetensors files take a library: pip install safetensors, or save with np.savez"
        ) from None
    try:
        with safe_open(path, framework="np"):
            pass  # it has compared the header with the size of the file, and no two tensors overlap
    except SafetensorError as error:
        raise ConfigError(f"{path}: neither a .safetensors nor an .npz file: {error}") from None
    stream.seek(0)
    header_bytes = int.from_bytes(stream.read(8), "little")
    header = json.loads(stream.read(header_bytes))
    entries = sorted((entry["data_offsets"][0], name, entry) for name, entry in header.items() if name != "__metadata__")
    return [
        _tensor(
            name, _SAFETENSORS.get(entry["dtype"], str(entry["dtype"])), math.prod(entry["shape"]), 8 + header_bytes + offset
        )
        for offset, name, entry in entries
    ]


def _npz(path: Path, archive: zipfile.ZipFile) -> list[Tensor]:
    members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
    if not members:
        raise ConfigError(
            f"{path}: a zip file without arrays (checkpoints of torch.save look like this); "
            "save gradients with safetensors.torch.save_file or np.savez"
        )
    tensors = []
    for member in members:
        name = member.filename.removesuffix(".npy")
        with _reporting(path, name), archive.open(member) as stream:
            count, stored = _read_npy_header(stream)
            header_bytes = stream.tell()
        if stored != np.dtype(object) and header_bytes + count * stored.itemsize != member.file_size:
            raise ConfigError(
                f"{path}: {name!r} has {member.file_size - header_bytes} bytes where its {count} elements of {stored} take "
                f"{count * stored.itemsize}; the file is damaged, write it again"
            )
        tensors.append(_tensor(name, stored, count, member.filename))
    return tensors


def _read_npy_header(stream: IO[bytes]) -> tuple[int, np.dtype]:
    """Elements and type of the array whose data follow."""
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"array format {version} is not 1.0 or 2.0")
    shape, _, dtype = readers[version](stream)
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"shape {shape}")
    return math.prod(shape), dtype


def _tensor(name: str, stored: np.dtype | str, count: int, place: int | str) -> Tensor:
    if isinstance(stored, str):
        return Tensor(name, stored, count, f"{stored} is no type that codecs take", np.dtype(np.uint8), place)
    stored = BFLOAT16 if stored == _NAMELESS else stored
    known = canonical_dtype(stored.newbyteorder("=")) in FLOAT_DTYPES
    left_out = None if known and count else "empty" if known else f"{dtype_name(stored)} is no type that codecs take"
    return Tensor(name, dtype_name(stored.newbyteorder("=")), count, left_out, stored, place)


def _native(values: np.ndarray) -> np.ndarray:
    """The same elements in this machine's byte order."""
    return values if values.dtype == BFLOAT16 else values.astype(values.dtype.newbyteorder("="), copy=False)


@contextmanager
def _reporting(path: Path, name: str | None) -> Iterator[None]:
    """Turns what zipfile, zlib and NumPy raise for damaged files into a ConfigError."""
    where = str(path) if name is None else f"{path}: {name!r}"
    kinds = (zipfile.BadZipFile, zlib.error, ValueError, TypeError, EOFError, RuntimeError, MemoryError)
    try:
        yield
    except ConfigError:
        raise
    except kinds as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{where}: damaged, or of a kind that is not read here: {reason}") from None
