"""Text to learn from that every Python installation has: the sources of its own standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VOCABULARY = 256  # a token is a byte
_HELD_OUT_EVERY = 20  # one file in so many is kept for validation
_MAX_BYTES = 8_000_000


@dataclass(frozen=True)
class Corpus:
    """Two byte streams, uint8, 1-D: whole files, so that nothing of a held-out file is ever trained on."""

    train: np.ndarray
    held_out: np.ndarray


def load() -> Corpus:
    """Reads the top-level modules of the standard library, in order of their names.

    Raises:
        FileNotFoundError: this Python has no sources, as in some minimal images.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(folder.glob("*.py"))
    if len(paths) < _HELD_OUT_EVERY:
        raise FileNotFoundError(f"no standard library sources in {folder}; install a Python that has them")
    held_out = paths[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]
    kept_back = set(held_out)
    return Corpus(_concatenated([path for path in paths if path not in kept_back]), _concatenated(held_out))


def _concatenated(paths: list[Path]) -> np.ndarray:
    return np.frombuffer(b"\n".join(path.read_bytes() for path in paths)[:_MAX_BYTES], dtype=np.uint8)


def batch(stream: np.ndarray, rng: np.random.Generator, sequences: int, length: int) -> np.ndarray:
    """`sequences` random pieces of `length + 1` bytes, int64, so that each token has its successor."""
    starts = rng.integers(0, stream.size - length - 1, size=sequences)
    return np.stack([stream[start : start + length + 1] for start in starts]).astype(np.int64)
