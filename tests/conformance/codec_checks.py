"""What every codec must do, as plain functions; tests/kernels has one line a codec and check."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from squinchcomm.errors import WireFormatError
from squinchcomm.kernels import Codec
from squinchcomm.kernels.dtypes import BFLOAT16, FLOAT32, FLOAT64, FLOAT_DTYPES, from_float32, to_float32

Bound = Callable[[np.ndarray], np.ndarray]  # float32 values -> the largest error allowed for each
COUNTS = (0, 1, 7, 127, 128, 129, 511, 512, 513, 1031, 65537)
SEED = 0x1234_5678_9ABC_DEF0


def gradients(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * np.exp(rng.standard_normal(count)) * 1e-3).astype(np.float32)


def cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return from_float32(values, dtype).copy()


def wire_dtype(codec: Codec, dtype: np.dtype) -> np.dtype:
    """The dtype to decode as: only `none` keeps the source's."""
    return dtype if codec.name == "none" else FLOAT32


def round_trip(codec: Codec, src: np.ndarray, **options: Any) -> np.ndarray:
    encoded = codec.encode(src, seed=SEED, **options)
    return to_float32(codec.decode(encoded, src.size, dtype=wire_dtype(codec, src.dtype)))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal float32 bit patterns, where one NaN is as good as another."""
    nan = np.isnan(a) & np.isnan(b)
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | nan))


def check_sizes(codec: Codec) -> None:
    for count in COUNTS:
        for dtype in FLOAT_DTYPES:
            encoded = codec.encode(cast(gradients(count), dtype), seed=SEED)
            assert encoded.dtype == np.uint8
            assert encoded.shape == (codec.encoded_nbytes(count, dtype),)
    tiles = codec.encoded_nbytes(100 * codec.tile_size) - codec.encoded_nbytes(0)
    assert tiles * 8 == pytest.approx(100 * codec.tile_size * codec.bits_per_element)


def check_round_trip(codec: Codec, bound: Bound) -> None:
    for count in COUNTS:
        for dtype in FLOAT_DTYPES:
            src = cast(gradients(count, count), dtype)
            exact = to_float32(src)
            error = np.abs(round_trip(codec, src).astype(np.float64) - exact)
            assert np.all(error <= bound(exact)), f"{count} {dtype}: {np.max(error - bound(exact), initial=0)}"


def check_extremes(codec: Codec, bound: Bound) -> None:
    for scale in (1e-45, 1e-40, 1e-38, 1e-30, 1e-12, 1.0, 1e12, 1e30, 1e38):
        with np.errstate(over="ignore"):
            values = np.clip(gradients(1500) * 1e3 * scale, -3e38, 3e38).astype(np.float32)
        decoded = round_trip(codec, values)
        assert np.isfinite(decoded).all()
        assert np.all(np.abs(decoded.astype(np.float64) - values) <= bound(values)), scale
    largest = np.full(700, np.finfo(np.float32).max, np.float32)
    if codec.name != "bf16":  # whose largest finite number is below
        assert np.isfinite(round_trip(codec, largest)).all()


def check_zeros(codec: Codec) -> None:
    zeros = np.zeros(1000, np.float32)
    zeros[::3] = -0.0
    decoded = round_trip(codec, zeros)
    assert np.all(decoded == 0)
    mixed = gradients(1000)
    mixed[::5] = 0
    assert np.all(np.abs(round_trip(codec, mixed)[::5]) == 0)


def check_nonfinite(codec: Codec) -> None:
    for dtype in FLOAT_DTYPES:
        for bad in (np.nan, -np.nan, np.inf, -np.inf):
            for place in (0, 77, 511, 512, 700):
                values = gradients(701)
                values[place] = bad
                decoded = round_trip(codec, cast(values, dtype))
                assert not np.isfinite(decoded[place]), (dtype, bad, place)
                untouched = np.ones(701, bool)
                untouched[place // 512 * 512 : place // 512 * 512 + 512] = False
                assert np.isfinite(decoded[untouched]).all()


def check_output_dtypes(codec: Codec) -> None:
    for count in (1, 513, 2000):
        src = gradients(count) * 1e6
        encoded = codec.encode(src, seed=SEED)
        if codec.name == "none":
            continue
        exact = codec.decode(encoded, count)
        for dtype in FLOAT_DTYPES:
            decoded = codec.decode(encoded, count, dtype=dtype)
            assert decoded.dtype == dtype
            assert same_bits(to_float32(decoded), to_float32(from_float32(exact, dtype)))
            out = np.zeros(count, dtype)
            assert codec.decode(encoded, count, out) is out
            assert out.tobytes() == decoded.tobytes()


def check_ml_dtypes(codec: Codec) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    src = gradients(1000).astype(ml_dtypes.bfloat16)
    encoded = codec.encode(src, seed=SEED)
    assert encoded.tobytes() == codec.encode(src.view(np.uint16).view(BFLOAT16), seed=SEED).tobytes()
    assert codec.decode(encoded, 1000, dtype=ml_dtypes.bfloat16).shape == (1000,)


def check_scale(codec: Codec) -> None:
    src = gradients(3000)
    for scale in (0.25, 1 / 3, -2.0):
        scaled = src * np.float32(scale)
        assert codec.encode(src, scale=scale, seed=SEED).tobytes() == codec.encode(scaled, seed=SEED).tobytes()


def check_residual(codec: Codec) -> None:
    for count in (1, 512, 1031):
        for magnitude in (1.0, 1e-20, 1e20):
            src = (gradients(count) * np.float32(magnitude)).astype(np.float32)
            residual = (gradients(count, 1) * np.float32(magnitude * 0.1)).astype(np.float32)
            value = src * np.float32(0.5) + residual
            encoded = codec.encode(src, scale=0.5, residual=residual, seed=SEED)
            assert encoded.tobytes() == codec.encode(value, seed=SEED).tobytes()
            assert same_bits(residual, value - codec.decode(encoded, count))


def check_residual_nonfinite(codec: Codec) -> None:
    src = gradients(1031)
    src[[3, 600]] = np.inf, np.nan
    residual = np.zeros(1031, np.float32)
    decoded = codec.decode(codec.encode(src, residual=residual, seed=SEED), 1031)
    assert np.all(residual[~(np.isfinite(src) & np.isfinite(decoded))] == 0)
    assert np.isfinite(residual).all()


def check_error_feedback(codec: Codec) -> None:
    """What is lost comes back: the sum of decoded values stays within one error of the sum of inputs."""
    residual, total = np.zeros(2000, np.float32), np.zeros(2000)
    src = gradients(2000)
    for _ in range(20):
        total += codec.decode(codec.encode(src, residual=residual, seed=SEED), 2000)
    np.testing.assert_allclose(total + residual, 20.0 * src, rtol=1e-4, atol=1e-7)


def check_decode_add(codec: Codec) -> None:
    for count in (0, 1, 511, 513, 4096):
        encoded = codec.encode(gradients(count), seed=SEED)
        acc = gradients(count, 5)
        expected = acc + codec.decode(encoded, count)
        codec.decode_add(encoded, acc)
        assert same_bits(acc, expected)


def _operands(codec: Codec, count: int, ranks: int) -> tuple[list[Any], np.ndarray]:
    inputs: list[Any] = []
    total = np.zeros(count, np.float32)
    for rank in range(ranks):
        src = gradients(count, rank)
        if rank == ranks // 2:
            inputs.append(src)
            term = src
        else:
            inputs.append(codec.encode(src, seed=rank))
            term = codec.decode(inputs[-1], count)
        total = term.copy() if rank == 0 else total + term
    return inputs, total


def check_reduce(codec: Codec) -> None:
    for count in (1, 513, 3000):
        for ranks in (1, 2, 3, 8):
            inputs, total = _operands(codec, count, ranks)
            for dtype in FLOAT_DTYPES if codec.name != "none" else (FLOAT32,):
                for scale in (1.0, 1 / ranks):
                    out = np.zeros(count, dtype)
                    assert codec.reduce(inputs, out, scale=scale) is out
                    expected = from_float32(total * np.float32(scale), dtype)
                    assert same_bits(to_float32(out), to_float32(expected))


def check_reduce_in_place(codec: Codec) -> None:
    for place in (0, 1, 2):
        encoded = [codec.encode(gradients(1031, rank), seed=rank) for rank in range(2)]
        own = gradients(1031, 9)
        terms: list[Any] = [codec.decode(each, 1031) for each in encoded]
        terms.insert(place, own.copy())
        inputs: list[Any] = list(encoded)
        inputs.insert(place, own)
        codec.reduce(inputs, own)
        assert same_bits(own, (terms[0] + terms[1]) + terms[2])


def check_reduce_plain_dtypes(codec: Codec) -> None:
    plain = [cast(gradients(700, i), dtype) for i, dtype in enumerate(FLOAT_DTYPES)]
    total = to_float32(plain[0]).copy()
    for each in plain[1:]:
        total = total + to_float32(each)
    assert same_bits(codec.reduce(plain, np.zeros(700, np.float32)), total)


def check_reduce_encode(codec: Codec) -> None:
    for count in (0, 1, 513, 3000):
        for ranks in (1, 2, 5):
            inputs, total = _operands(codec, count, ranks)
            encoded = codec.reduce_encode(inputs, count, scale=1 / ranks, seed=SEED)
            assert encoded.tobytes() == codec.encode(total, scale=1 / ranks, seed=SEED).tobytes()
            as_bytes = [bytes(each) if each.dtype == np.uint8 else each for each in inputs]
            assert codec.reduce_encode(as_bytes, count, scale=1 / ranks, seed=SEED).tobytes() == encoded.tobytes()


def check_buffers(codec: Codec) -> None:
    """Any bytes-like input, any alignment, exactly the memory given."""
    src = gradients(777)
    encoded = codec.encode(src, seed=SEED)
    expected = codec.decode(encoded, 777)
    for form in (encoded.tobytes(), bytearray(encoded), memoryview(encoded.tobytes())):
        assert same_bits(codec.decode(form, 777), expected)
    for offset in (1, 3):
        guarded = np.full(encoded.size + 8, 0xA5, np.uint8)
        codec.encode(src, guarded[offset : offset + encoded.size], seed=SEED)
        assert guarded[offset : offset + encoded.size].tobytes() == encoded.tobytes()
        assert np.all(guarded[:offset] == 0xA5) and np.all(guarded[offset + encoded.size :] == 0xA5)
        assert same_bits(codec.decode(guarded[offset : offset + encoded.size], 777), expected)
    values = np.full(777 + 8, 5.0, np.float32)
    codec.decode(encoded, 777, values[3:780])
    assert np.all(values[:3] == 5) and np.all(values[780:] == 5)


def check_bad_arguments(codec: Codec) -> None:
    src = gradients(600)
    encoded = codec.encode(src, seed=SEED)
    read_only = np.zeros(600, np.float32)
    read_only.flags.writeable = False
    out, acc = np.zeros(encoded.size, np.uint8), np.zeros(600, np.float32)
    bad: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "src", lambda: codec.encode(np.zeros(4, np.int32), seed=SEED)),
        (TypeError, "src", lambda: codec.encode([1.0, 2.0], seed=SEED)),  # type: ignore[arg-type]
        (ValueError, "src", lambda: codec.encode(np.zeros((2, 3), np.float32), seed=SEED)),
        (ValueError, "src", lambda: codec.encode(src[::2], seed=SEED)),
        (ValueError, "out", lambda: codec.encode(src, out[:-1], seed=SEED)),
        (TypeError, "out", lambda: codec.encode(src, np.zeros(encoded.size, np.int8), seed=SEED)),
        (ValueError, "residual", lambda: codec.encode(src, residual=np.zeros(599, np.float32), seed=SEED)),
        (TypeError, "residual", lambda: codec.encode(src, residual=np.zeros(600, np.float64), seed=SEED)),
        (ValueError, "residual", lambda: codec.encode(src, residual=read_only, seed=SEED)),
        (WireFormatError, "src", lambda: codec.decode(encoded[:-1], 600)),
        (WireFormatError, "src", lambda: codec.decode(bytes(encoded) + b"x", 600)),
        (TypeError, "src", lambda: codec.decode(encoded.astype(np.int32), 600)),
        (ValueError, "count", lambda: codec.decode(encoded, -1)),
        (TypeError, "count", lambda: codec.decode(encoded, 600.0)),  # type: ignore[arg-type]
        (TypeError, "dtype", lambda: codec.decode(encoded, 600, dtype=np.int32)),
        (ValueError, "out", lambda: codec.decode(encoded, 600, np.zeros(601, np.float32))),
        (ValueError, "out", lambda: codec.decode(encoded, 600, read_only)),
        (ValueError, "out", lambda: codec.decode(encoded, 600, np.zeros(1200, np.float32)[::2])),
        (TypeError, "acc", lambda: codec.decode_add(encoded, np.zeros(600, FLOAT64))),
        (ValueError, "acc", lambda: codec.decode_add(encoded, read_only)),
        (WireFormatError, "src", lambda: codec.decode_add(encoded[:-1], acc)),
        (ValueError, "inputs", lambda: codec.reduce([], acc)),
        (ValueError, r"inputs\[1\]", lambda: codec.reduce([encoded, src[:-1]], acc)),
        (WireFormatError, r"inputs\[0\]", lambda: codec.reduce([encoded[:-1]], acc)),
        (TypeError, r"inputs\[1\]", lambda: codec.reduce([encoded, 7], acc)),
        (ValueError, "out", lambda: codec.reduce_encode([src], 600, out[:-1], seed=SEED)),
    ]
    for error, match, call in bad:
        with pytest.raises(error, match=match):
            call()
    assert not acc.any()


def check_garbage(codec: Codec) -> None:
    rng = np.random.default_rng(3)
    for count in (1, 513, 3000):
        for _ in range(20):
            garbage = rng.integers(0, 256, codec.encoded_nbytes(count), dtype=np.uint8)
            acc = np.zeros(count, np.float32)
            for call in (
                lambda: codec.decode(garbage, count),  # noqa: B023
                lambda: codec.decode_add(garbage, acc),  # noqa: B023
                lambda: codec.reduce_encode([acc, garbage], count, seed=SEED),  # noqa: B023
            ):
                try:
                    call()
                except WireFormatError:
                    pass


def check_threads(codec: Codec) -> None:
    """Calls at the same time give what each gives alone."""
    sources = [gradients(40_000, seed) for seed in range(4)]
    expected = [codec.encode(src, seed=SEED).tobytes() for src in sources]
    failures: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if codec.encode(sources[i], seed=SEED).tobytes() != expected[i]:
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def check_releases_gil(codec: Codec) -> None:
    """Another Python thread makes progress inside one long call."""
    src = np.zeros(1 << 24, np.float32)
    out = np.empty(codec.encoded_nbytes(src.size), np.uint8)
    codec.encode(src[:1], seed=SEED)
    inside, ticks = threading.Event(), 0
    done = threading.Event()

    def call() -> None:
        inside.set()
        for _ in range(5):
            codec.encode(src, out, scale=0.5, seed=SEED)
        done.set()

    thread = threading.Thread(target=call)
    thread.start()
    inside.wait()
    while not done.is_set():
        ticks += 1
    thread.join()
    assert ticks > 1000  # with the GIL held, one turn a call at most


def check_attributes(codec: Codec) -> None:
    assert 0 <= codec.wire_id <= 255
    assert codec.wire_version >= 1
    assert codec.rounding in ("exact", "nearest", "stochastic")
    assert codec.nonfinite_rule.endswith(".") and codec.error_bound.endswith(".")


CHECKS = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
BOUND_CHECKS = [check_round_trip, check_extremes]
