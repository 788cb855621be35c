"""Writes what each codec's bytes mean, once per wire version: `python -m tests.kernels.golden.make_golden`.

A file is never rewritten: a codec whose bytes change gets a new wire version and a new file beside the old one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from squinchcomm.kernels import get_codec

HERE = Path(__file__).parent
CODECS = ("none", "bf16", "int8", "squinch6", "squinch6-sr")


def inputs() -> dict[str, np.ndarray]:
    """Values of every kind, small enough to commit."""
    rng = np.random.default_rng(2026)
    wide = (rng.standard_normal(700) * np.exp(4 * rng.standard_normal(700))).astype(np.float32)
    special = wide[:600].copy()
    special[[0, 5, 77, 300, 599]] = np.nan, np.inf, -np.inf, -0.0, 1e-45
    huge = np.clip(wide[:513], -99, 99) * np.float32(3e36)
    return {"wide": wide, "special": special, "tiny": wide[:65] * np.float32(1e-36), "huge": huge}


def main() -> None:
    for name in CODECS:
        codec = get_codec(name)
        path = HERE / f"{name}-v{codec.wire_version}.npz"
        if path.exists():
            continue
        content: dict[str, np.ndarray] = {}
        for case, values in inputs().items():
            encoded = codec.encode(values, seed=42)
            content[f"{case}.values"] = values.view(np.uint32)
            content[f"{case}.encoded"] = encoded
            content[f"{case}.decoded"] = codec.decode(encoded, values.size).view(np.uint32)
        np.savez_compressed(path, allow_pickle=False, **content)


if __name__ == "__main__":
    main()
