"""Counters of one communicator, kept in plain integers so that counting costs nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Stats:
    """What a communicator has done so far. Bytes count collectives and point-to-point alike.

    Attributes:
        collectives: Calls that finished.
        failures: Calls that failed.
        compressed: Calls whose payload was encoded by a lossy codec.
        uncompressed: Calls that asked for a codec but went lossless, by reason.
        raw_bytes: Bytes that the finished calls would have sent uncompressed.
        sent_wire_bytes: Payload and header bytes handed to the transport.
        received_wire_bytes: Payload and header bytes taken from the transport.
        frames_corrupt: Frames refused by checksum or header.
        encode_s: Seconds spent on contributions: encoding them, or reading them from the array.
        decode_s: Seconds spent on arrivals: decoding, reducing, encoding the reduced, or copying.
        wait_s: Seconds waiting for frames.
    """

    collectives: int = 0
    failures: int = 0
    compressed: int = 0
    uncompressed: Counter[str] = field(default_factory=Counter)
    raw_bytes: int = 0
    sent_wire_bytes: int = 0
    received_wire_bytes: int = 0
    frames_corrupt: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0

    def clear(self) -> None:
        """Starts over at zero."""
        self.uncompressed.clear()
        for name in self.__slots__:
            if name != "uncompressed":
                setattr(self, name, type(getattr(self, name))())
