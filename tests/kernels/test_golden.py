"""Bytes written by every wire version so far are decoded to the same values for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from squinchcomm.kernels import get_codec
from tests.conformance.codec_checks import same_bits

FILES = sorted((Path(__file__).parent / "golden").glob("*.npz"))


def test_every_codec_has_a_file() -> None:
    for name in ("none", "bf16", "int8", "squinch6", "squinch6-sr"):
        assert f"{name}-v{get_codec(name).wire_version}.npz" in [path.name for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    name, version = path.stem.rsplit("-v", 1)
    codec = get_codec(name)
    with np.load(path, allow_pickle=False) as content:
        for case in sorted({key.split(".")[0] for key in content.files}):
            values = content[f"{case}.values"].view(np.float32)
            encoded = content[f"{case}.encoded"]
            assert same_bits(codec.decode(encoded, values.size), content[f"{case}.decoded"].view(np.float32))
            if int(version) == codec.wire_version:
                assert codec.encode(values, seed=42).tobytes() == encoded.tobytes()
