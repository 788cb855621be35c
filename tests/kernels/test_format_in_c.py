"""docs/format.md is enough: an implementation in C, written from it, gives the same bytes and values."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from squinchcomm.kernels import get_codec
from tests.conformance.codec_checks import gradients, same_bits

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("c") / "squinch6.so"
    source = Path(__file__).with_name("squinch6.c")
    flags = ["-std=c11", "-O1", "-ffp-contract=off", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run([str(COMPILER), *flags, str(source), "-o", str(target), "-lm"], check=True, timeout=60)
    loaded = ctypes.CDLL(str(target))
    loaded.squinch6_encode.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
    loaded.squinch6_decode.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return loaded


def _cases() -> dict[str, np.ndarray]:
    special = gradients(1500)
    special[[0, 9, 600, 601, 1499]] = np.nan, -np.inf, -0.0, 1e-45, np.inf
    bits = np.random.default_rng(6).integers(0, 2**32, 3001, dtype=np.uint32).view(np.float32)
    huge = np.full(513, np.finfo(np.float32).max, np.float32)
    return {
        "gradients": gradients(5000),
        "special": special,
        "bits": bits,
        "tiny": gradients(600) * np.float32(1e-36),
        "huge": huge,
    }


@pytest.mark.parametrize("case", list(_cases()))
@pytest.mark.parametrize("name", ["squinch6", "squinch6-sr"])
def test_same_bytes_and_values(library: ctypes.CDLL, name: str, case: str) -> None:
    values, seed = _cases()[case], 0xFEDC_BA98_7654_3210
    codec = get_codec(name)
    encoded = codec.encode(values, seed=seed)
    theirs = np.empty_like(encoded)
    library.squinch6_encode(values.ctypes.data, values.size, theirs.ctypes.data, name == "squinch6-sr", seed)
    assert theirs.tobytes() == encoded.tobytes()
    decoded = np.empty(values.size, np.float32)
    library.squinch6_decode(encoded.ctypes.data, values.size, decoded.ctypes.data)
    assert same_bits(decoded, codec.decode(encoded, values.size))
