"""Squinch: kernels equal the NumPy definition bit for bit, and the format's statistics are what it claims."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from squinchcomm.errors import WireFormatError
from squinchcomm.kernels import get_codec, int8_reference, squinch6_reference
from squinchcomm.kernels.kernel_codec import STREAMED_BYTES
from squinchcomm.kernels.squinch6_tables import D, M, R
from tests.conformance.codec_checks import same_bits

NEAREST, STOCHASTIC = get_codec("squinch6"), get_codec("squinch6-sr")
FLOAT_MAX = np.finfo(np.float32).max


def _float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _distributions(count: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal(count)
    return {
        "gaussian": _float32(normal),
        "laplace": _float32(rng.laplace(size=count)),
        "t3": _float32(rng.standard_t(3, count)),
        "log-normal scales": _float32(normal * np.exp(2 * rng.standard_normal(count))),
        "wide": _float32(normal * np.exp(15 * rng.standard_normal(count))),
        "raw bits": rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32),
        "finite bits": np.clip(rng.integers(0, 2**31 - 2**24, count, dtype=np.uint32).view(np.float32), 0, FLOAT_MAX),
        "subnormal": rng.integers(0, 2**23, count, dtype=np.uint32).view(np.float32),
        "around 1e-38": _float32(normal * 1e-38),
        "around 1e38": np.clip(_float32(normal * 1e38), -FLOAT_MAX, FLOAT_MAX),
        "largest": np.full(count, FLOAT_MAX, np.float32),
        "sparse": np.where(rng.random(count) < 0.02, _float32(normal), np.float32(0)),
        "some infinite": np.where(rng.random(count) < 0.01, np.float32(-np.inf), _float32(normal)),
        "some NaN": np.where(rng.random(count) < 0.01, np.float32(np.nan), _float32(normal * 1e-30)),
        "scales themselves": M[rng.integers(0, 255, count)],
        "next to scales": np.nextafter(M[rng.integers(1, 255, count)], np.float32(np.inf)),
        "constant": np.full(count, 0.1, np.float32),
        "powers of two": _float32(2.0 ** rng.integers(-149, 128, count)),
    }


@pytest.mark.parametrize("count", [1, 511, 513, 65537])
@pytest.mark.parametrize("name", list(_distributions(1, 0)))
def test_kernels_equal_reference(name: str, count: int) -> None:
    values = _distributions(count, count)[name]
    encoded = NEAREST.encode(values)
    assert encoded.tobytes() == squinch6_reference.encode(values).tobytes()
    assert same_bits(NEAREST.decode(encoded, count), squinch6_reference.decode(encoded, count))
    seed = 2**64 - 977
    assert STOCHASTIC.encode(values, seed=seed).tobytes() == squinch6_reference.encode(values, seed).tobytes()
    int8 = get_codec("int8")
    assert int8.encode(values).tobytes() == int8_reference.encode(values).tobytes()
    assert same_bits(int8.decode(int8.encode(values), count), int8_reference.decode(int8.encode(values), count))


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), exponent=st.integers(-149, 127))
def test_decoding_any_bytes_equals_reference(bits: list[int], exponent: int) -> None:
    words = np.resize(np.array(bits, np.uint32), 96).view(np.uint8)
    encoded = np.concatenate([words, np.array([exponent, 0], "<i4").view(np.uint8)])
    assert same_bits(NEAREST.decode(encoded, 512), squinch6_reference.decode(encoded, 512))


def test_tables_are_correctly_rounded() -> None:
    getcontext().prec = 50
    for q in range(1, 255):
        exact = (Decimal(q - 128) / 6).exp()
        lower, upper = (Decimal(float(np.nextafter(M[q], np.float32(side)))) for side in (-np.inf, np.inf))
        middle = Decimal(float(M[q]))
        assert (lower + middle) / 2 < exact < (middle + upper) / 2
        assert np.float32(225) / M[q] == R[q] and M[q] / np.float32(225) == D[q]
    assert M[0] == R[0] == D[0] == M[255] == R[255] == D[255] == 0


def test_philox_known_answers() -> None:
    """From the test vectors of the Random123 library."""
    zero = squinch6_reference.philox(np.zeros(1, np.uint64), 0)[:, 0]
    assert [f"{word:08x}" for word in zero] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def _snr_and_bias(values: np.ndarray, decoded: np.ndarray) -> tuple[float, float]:
    exact, got = values.astype(np.float64), decoded.astype(np.float64)
    snr = 10 * math.log10(np.sum(exact**2) / np.sum((exact - got) ** 2))
    return snr, float(np.abs(got).mean() / np.abs(exact).mean() - 1)


@pytest.mark.parametrize(
    ("name", "nearest", "stochastic"), [("gaussian", 26.35, 23.24), ("laplace", 26.34, 23.24), ("t3", 26.50, 23.37)]
)
def test_snr_and_bias(name: str, nearest: float, stochastic: float) -> None:
    values = _distributions(1 << 20, 5)[name]
    snr, bias = _snr_and_bias(values, NEAREST.decode(NEAREST.encode(values), values.size))
    assert snr == pytest.approx(nearest, abs=0.12)
    assert abs(bias) <= 5e-4
    snr, bias = _snr_and_bias(values, STOCHASTIC.decode(STOCHASTIC.encode(values, seed=1), values.size))
    assert snr == pytest.approx(stochastic, abs=0.12)
    assert abs(bias) <= 6e-4


def test_snr_of_gradient_like_data() -> None:
    rng = np.random.default_rng(8)
    values = _float32(rng.standard_t(5, (512, 2048)) * np.exp(1.5 * rng.standard_normal((512, 1))) * 1e-4).reshape(-1)
    snr, bias = _snr_and_bias(values, NEAREST.decode(NEAREST.encode(values), values.size))
    assert snr >= 26 and abs(bias) <= 5e-4


@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e-6, 1.0, 1e9, 1e38])
def test_snr_is_the_same_at_every_magnitude(scale: float) -> None:
    values = _float32(np.random.default_rng(2).uniform(-2, 2, 1 << 16) * scale)
    snr, _ = _snr_and_bias(values, NEAREST.decode(NEAREST.encode(values), values.size))
    assert snr >= 26


def test_stochastic_rounding_is_unbiased() -> None:
    values = np.random.default_rng(4).standard_normal(4096).astype(np.float32)
    runs = 400
    decoded = np.stack([STOCHASTIC.decode(STOCHASTIC.encode(values, seed=seed), 4096) for seed in range(runs)])
    error = decoded.mean(axis=0) - values
    q = NEAREST.encode(values)[:-8].reshape(-1, 384)[:, None, :64].repeat(8, axis=1).reshape(-1)
    u = np.abs(values).astype(np.float64) * R[q]
    k = np.floor(np.sqrt(u))
    chance = (u - k * k) / (2 * k + 1)
    standard_error = np.sqrt(chance * (1 - chance) / runs) * (2 * k + 1) * D[q]
    # Chances near 0 or 1 have seen too few events to be normal.
    pull = (error / standard_error)[np.minimum(chance, 1 - chance) * runs > 20]
    assert pull.size > 3000
    assert abs(pull.mean()) < 4 / math.sqrt(pull.size)
    assert 0.95 < pull.std() < 1.05
    assert np.abs(pull).max() < 5.5
    nearest = NEAREST.decode(NEAREST.encode(values), 4096) - values
    assert np.abs(error).mean() < 0.1 * np.abs(nearest).mean()


def test_stochastic_draws_depend_on_seed_and_place_alone() -> None:
    values = np.random.default_rng(4).standard_normal(2048).astype(np.float32)
    whole = STOCHASTIC.encode(values, seed=5)
    assert whole.tobytes() == STOCHASTIC.encode(values, seed=5).tobytes()
    assert whole.tobytes() != STOCHASTIC.encode(values, seed=6).tobytes()
    assert whole[: 2 * 384].tobytes() == STOCHASTIC.encode(values[:1024], seed=5)[: 2 * 384].tobytes()


def _allreduce_snr(ranks: int, common: float) -> float:
    """Each rank's gradient is a common part and an own part; the owner reduces and encodes once more."""
    rng = np.random.default_rng(ranks)
    count = 1 << 18
    shared = rng.standard_normal(count) * math.sqrt(common)
    gradients = [_float32(shared + rng.standard_normal(count) * math.sqrt(1 - common)) for _ in range(ranks)]
    inputs = [gradients[0], *(NEAREST.encode(gradient) for gradient in gradients[1:])]
    result = NEAREST.decode(NEAREST.reduce_encode(inputs, count, scale=1 / ranks), count)
    return _snr_and_bias(np.mean(np.stack(gradients).astype(np.float64), axis=0), result)[0]


@pytest.mark.parametrize("ranks", [4, 8])
def test_snr_of_an_allreduce(ranks: int) -> None:
    assert _allreduce_snr(ranks, common=0.5) >= 24.5
    # Nothing in common is the worst case: the sum grows no faster than the errors do.
    assert _allreduce_snr(ranks, common=0.0) >= 23.4


def test_error_does_not_grow_with_ranks() -> None:
    for common in (0.0, 0.5):
        two, eight = _allreduce_snr(2, common), _allreduce_snr(8, common)
        assert 10 ** ((two - eight) / 20) <= 1.5


@pytest.mark.parametrize(("exponent", "reserved"), [(128, 0), (-150, 0), (0, 1), (2**31 - 1, 0), (0, 2**32 - 1)])
def test_foreign_trailers_are_refused(exponent: int, reserved: int) -> None:
    encoded = NEAREST.encode(np.ones(512, np.float32))
    encoded[-8:-4] = np.frombuffer(np.array(exponent, "<i4").tobytes(), np.uint8)
    encoded[-4:] = np.frombuffer(np.array(reserved, "<u4").tobytes(), np.uint8)
    for call in (
        lambda: NEAREST.decode(encoded, 512),
        lambda: NEAREST.decode_add(encoded, np.zeros(512, np.float32)),
        lambda: NEAREST.reduce([encoded], np.zeros(512, np.float32)),
        lambda: NEAREST.reduce_encode([encoded], 512),
    ):
        with pytest.raises(WireFormatError, match="trailer"):
            call()


@pytest.mark.parametrize(("seed", "error"), [(None, ValueError), (-1, ValueError), (2**64, ValueError), (1.0, TypeError)])
def test_bad_seeds(seed: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="seed"):
        STOCHASTIC.encode(np.ones(8, np.float32), seed=seed)
    with pytest.raises(error, match="seed"):
        STOCHASTIC.reduce_encode([np.ones(8, np.float32)], 8, seed=seed)


def test_large_outputs_are_the_same() -> None:
    """Outputs of 32 MiB and more are written past the caches."""
    count = STREAMED_BYTES // 4 + 5
    values = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    encoded = NEAREST.encode(values)
    large = NEAREST.decode(encoded, count)
    small = np.concatenate([NEAREST.decode(np.concatenate([encoded[:384_000], encoded[-8:]]), 512_000), large[512_000:]])
    assert same_bits(large, small)
