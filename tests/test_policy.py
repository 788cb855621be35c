"""Which calls are compressed, and what is counted when they are not."""

from __future__ import annotations

import numpy as np
import pytest

from squinchcomm.communicator import Communicator
from squinchcomm.errors import ConfigError
from squinchcomm.policy import choose_codec
from tests.worlds import run_world


def test_policy() -> None:
    def chosen(requested: str | None, default: str, dtype: object, nbytes: int, reduction: str) -> tuple[str, str | None]:
        codec, reason = choose_codec(
            requested, default, dtype=np.dtype(dtype), nbytes=nbytes, reduction=reduction, min_compress_bytes=65536
        )
        return codec.name, reason

    assert chosen(None, "none", np.float32, 1 << 20, "sum") == ("none", None)
    assert chosen(None, "squinch6", np.float32, 1 << 20, "avg") == ("squinch6", None)
    assert chosen(None, "squinch6", np.float32, 65535, "sum") == ("none", "small")
    assert chosen("squinch6", "none", np.float32, 100, "sum") == ("none", "small")
    assert chosen(None, "squinch6", np.int64, 1 << 20, "sum") == ("none", "dtype")
    assert chosen(None, "squinch6", np.float64, 1 << 20, "sum") == ("none", "dtype")
    assert chosen("squinch6", "none", np.float64, 1 << 20, "sum") == ("squinch6", None)
    assert chosen(None, "squinch6", np.float32, 1 << 20, "max") == ("none", "op")
    assert chosen("none", "squinch6", np.float32, 1 << 20, "sum") == ("none", None)
    with pytest.raises(
        ConfigError, match=r"^the setting codec \(SQUINCH_CODEC\): unknown codec 'zip'; known are none, .*, and auto$"
    ):
        chosen(None, "zip", np.float32, 100, "sum")
    with pytest.raises(ConfigError, match=r"^unknown codec 'zip'"):
        chosen("zip", "none", np.float32, 100, "sum")


@pytest.mark.parametrize(
    ("compress", "requested", "expected"),
    [
        ("auto", None, ("squinch6", None)),
        ("explicit", None, ("none", "explicit")),
        ("explicit", "squinch6", ("squinch6", None)),
        ("off", None, ("none", "off")),
        ("off", "squinch6", ("none", "off")),
        ("off", "none", ("none", None)),
    ],
)
def test_compress_says_who_may_ask(compress: str, requested: str | None, expected: tuple[str, str | None]) -> None:
    codec, reason = choose_codec(
        requested,
        "squinch6",
        dtype=np.dtype(np.float32),
        nbytes=1 << 20,
        reduction="premul_sum",
        min_compress_bytes=65536,
        compress=compress,
    )
    assert (codec.name, reason) == expected


def test_what_stays_uncompressed_is_counted_with_its_reason() -> None:
    def body(comm: Communicator) -> None:
        for array, op in (
            (np.ones(9, np.float32), "sum"),
            (np.ones(90_000, np.int32), "sum"),
            (np.ones(90_000, np.float32), "max"),
        ):
            comm.allreduce(array, op)
        assert dict(comm.stats.uncompressed) == {"small": 1, "dtype": 1, "op": 1}
        assert "uncompressed: dtype 1, op 1, small 1" in str(comm.stats) and str(comm.stats).count("\n") == 0
        assert f"{comm.stats.compressed} of {comm.stats.collectives} collectives compressed" in repr(comm.stats)
        assert f"as {comm.stats.sent_wire_bytes:,} on the wire" in str(comm.stats)
        assert comm.stats.compressed == 0 and comm.stats.collectives == 3
        comm.allreduce(np.ones(90_000, np.float32))
        assert comm.stats.compressed == 1

    run_world(2, body, codec="squinch6")
