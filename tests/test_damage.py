"""Frames damaged on their way are never delivered as data."""

from __future__ import annotations

import random

import numpy as np
import pytest

from squinchcomm.collectives import wire
from squinchcomm.communicator import Communicator
from squinchcomm.errors import (
    MismatchError,
    SquinchError,
    WireFormatError,
)
from squinchcomm.transport.base import Frame
from tests.conformance.collective_checks import random_array
from tests.conformance.faulty import LooseFrame
from tests.worlds import outcomes, run_world


class Damager:
    """Damages one frame, the `at`-th; `kind` says how. `fired` proves that it did."""

    def __init__(self, kind: str, at: int, seed: int) -> None:
        self.kind = kind
        self.at = at
        self.random = random.Random(seed)
        self.fired = 0
        self.seen = 0
        self.kept: Frame | None = None
        self.history: list[tuple[int, bytes, bytes]] = []

    def __call__(self, frame: Frame) -> list[Frame]:
        header, payload = bytes(frame.header), bytes(frame.payload)
        self.history.append((frame.peer, header, payload))
        self.seen += 1
        if self.kept is not None and frame.peer == self.kept.peer:
            kept, self.kept = self.kept, None
            self.fired += 1
            return [frame, kept]
        if self.seen != self.at:
            return [frame]
        if self.kind == "reorder":
            self.kept = frame
            return []
        self.fired += 1
        if self.kind == "flip header":
            header = self._flip(header)
        elif self.kind == "flip payload":
            payload = self._flip(payload)
        elif self.kind == "truncate":
            payload = payload[: self.random.randrange(len(payload))]
        elif self.kind == "extend":
            payload += b"\0" * 8
        elif self.kind == "repeat":
            return [frame, LooseFrame(None, frame.peer, header, payload)]
        elif self.kind == "stale":
            _, header, payload = next(old for old in self.history if old[0] == frame.peer)
        elif self.kind == "lose":
            return []
        return [LooseFrame(frame, frame.peer, header, payload)]

    def _flip(self, data: bytes) -> bytes:
        bits = bytearray(data)
        position = self.random.randrange(len(bits) * 8)
        bits[position // 8] ^= 1 << position % 8
        return bytes(bits)


@pytest.mark.parametrize("codec", ["none", "squinch6"])
@pytest.mark.parametrize("kind", ["flip header", "flip payload", "truncate", "extend", "repeat", "stale", "reorder", "lose"])
def test_damaged_frames_are_never_delivered_as_data(kind: str, codec: str) -> None:
    fired = 0
    for trial in range(12):
        damager = Damager(kind, 8 + trial, trial)
        finished: list[tuple[int, int, bytes]] = []

        def body(comm: Communicator, finished: list[tuple[int, int, bytes]] = finished) -> None:
            for index in range(6):
                array = random_array(comm.rank * 10 + index, 60_000)
                comm.allreduce(array, codec=codec, timeout_s=1.0)
                finished.append((comm.rank, index, array.tobytes()))

        results = outcomes(3, body, damage={1: damager}, min_compress_bytes=0, chunk_bytes=16 << 10)
        fired += damager.fired
        for result in results:
            assert result is None or isinstance(result, SquinchError), result
        if damager.fired and kind != "lose":
            assert isinstance(results[1], WireFormatError | MismatchError), results
        for index in range(6):
            assert len({bits for _, number, bits in finished if number == index}) <= 1
        reference: dict[int, bytes] = _reference(codec)
        for _, index, bits in finished:
            assert bits == reference[index]
    assert fired >= 8


_references: dict[str, dict[int, bytes]] = {}


def _reference(codec: str) -> dict[int, bytes]:
    if codec not in _references:

        def body(comm: Communicator) -> list[bytes]:
            arrays = [random_array(comm.rank * 10 + index, 60_000) for index in range(6)]
            for array in arrays:
                comm.allreduce(array, codec=codec)
            return [array.tobytes() for array in arrays]

        _references[codec] = dict(enumerate(run_world(3, body, min_compress_bytes=0, chunk_bytes=16 << 10)[0]))
    return _references[codec]


def test_no_damage_in_100_000_passes_the_frame_check() -> None:
    rng = random.Random(7)
    signature = wire.Signature("allreduce", "sum", np.dtype(np.float32), 1000, (1000,)).pack(99, 12)
    for index in range(100_000):
        payload = rng.randbytes(rng.randrange(1, 200))
        header = wire.frame_header(signature, index, 1, 3, len(payload), wire.payload_crc(payload))
        assert wire.check_frame(header, np.frombuffer(payload, np.uint8), index) is None
        bad_header, bad_payload, expected = bytearray(header), bytearray(payload), index
        fault = index % 5
        if fault == 0:
            bad_header[rng.randrange(len(header))] ^= rng.randrange(1, 256)
        elif fault == 1:
            bad_payload[rng.randrange(len(payload))] ^= rng.randrange(1, 256)
        elif fault == 2:
            del bad_payload[rng.randrange(len(payload)) :]
        elif fault == 3:
            expected += rng.choice((-1, 1, 1000))
        else:
            del bad_header[rng.randrange(len(header)) :]
        assert wire.check_frame(bytes(bad_header), np.frombuffer(bytes(bad_payload), np.uint8), expected) is not None
