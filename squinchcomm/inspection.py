"""What each codec does to an array, measured; and which codec suits it.

Arrays come in pieces, so that memory does not grow with them. A piece is encoded by itself, as a chunk of a collective is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from squinchcomm.kernels.codec import Codec
from squinchcomm.kernels.dtypes import BFLOAT16, to_float32

PIECE_ELEMENTS = 1 << 18
_CHANCE = 3.3  # standard deviations that one normal variable in a thousand exceeds
_RUN_ELEMENTS = 4096  # consecutive elements of a sample: whole tiles and blocks of every codec


@dataclass(slots=True)
class Loss:
    """What one codec loses of an array. Sums over elements that are finite before and after; see the properties.

    Attributes:
        codec: Its name.
        encoded_bytes: Of the pieces looked at.
        elements: In them.
        spoiled: Finite elements that come back as NaN or infinity.
        zeroed: Elements other than 0 that come back as 0.
    """

    codec: str
    encoded_bytes: int = 0
    elements: int = 0
    spoiled: int = 0
    zeroed: int = 0
    nonzero: int = 0
    square_sum: float = 0.0
    square_error: float = 0.0
    magnitude_sum: float = 0.0
    decoded_sum: float = 0.0

    @property
    def bits(self) -> float:
        """Encoded bits an element; a short array pays for its padding."""
        return 8 * self.encoded_bytes / self.elements

    @property
    def snr_db(self) -> float | None:
        """Signal over noise, dB: infinite if nothing is lost, None if there is no signal."""
        if self.square_error == 0:
            return math.inf if self.square_sum else None
        return 10 * math.log10(self.square_sum / self.square_error) if self.square_sum else None

    @property
    def bias(self) -> float | None:
        """Relative change of the mean magnitude; None if that is 0."""
        return self.decoded_sum / self.magnitude_sum - 1 if self.magnitude_sum else None

    @property
    def bias_by_chance(self) -> float:
        """Standard deviation of the bias if errors were independent and without bias: what few elements make of it."""
        return math.sqrt(self.square_error) / self.magnitude_sum if self.magnitude_sum else 0.0

    @property
    def zeroed_share(self) -> float:
        """Part of the elements other than 0 that come back as 0."""
        return self.zeroed / self.nonzero if self.nonzero else 0.0

    def add(self, other: Loss) -> None:
        """Takes in what the same codec loses of another array."""
        for name in Loss.__slots__:
            if name != "codec":
                setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class Finding:
    """An array as it is, and what codecs make of it. Counts are of the elements looked at.

    Attributes:
        name: Of the array.
        dtype: In words.
        count: Elements in all.
        seen: Elements looked at.
        zeros: Elements that are 0.
        nonfinite: NaNs and infinities.
        smallest: Magnitude other than 0; infinite if there is none.
        largest: Finite magnitude.
        losses: One a codec, in the order asked for.
    """

    name: str
    dtype: str
    count: int
    seen: int = 0
    zeros: int = 0
    nonfinite: int = 0
    smallest: float = math.inf
    largest: float = 0.0
    losses: list[Loss] = field(default_factory=list)

    def loss(self, codec: str) -> Loss:
        """Of the codec of that name, which was asked for."""
        return next(loss for loss in self.losses if loss.codec == codec)


@dataclass(frozen=True)
class Limits:
    """What an array may lose.

    Attributes:
        min_snr_db: Noise of a 6-bit encoding is 26 dB below gradients of most kinds; averages over ranks and steps reduce it further.
        max_bias: Of the mean magnitude, which optimisers take for a smaller or larger step. What chance does in one of a thousand
            arrays comes on top.
        max_zeroed: Share of elements other than 0 that vanish.
    """

    min_snr_db: float = 20.0
    max_bias: float = 0.01
    max_zeroed: float = 0.1


@dataclass(frozen=True)
class Advice:
    """The codec for an array, and why it is not the one wanted; `reason` is None if it is."""

    codec: str
    reason: str | None


def sample_spans(count: int, most: int) -> list[tuple[int, int]]:
    """Ascending spans of elements to look at: all, or, if that is more than `most`, runs spread evenly; 0 means no limit.

    Runs are as long as a few tiles, so a limit below that still looks at one run.
    """
    if not most or count <= most:
        return [(start, min(start + PIECE_ELEMENTS, count)) for start in range(0, count, PIECE_ELEMENTS)]
    runs = max(1, most // _RUN_ELEMENTS)
    length = min(_RUN_ELEMENTS, count)
    steps = max(1, runs - 1)
    return [(start, start + length) for start in ((count - length) * run // steps for run in range(runs))]


def examine(name: str, dtype: str, count: int, pieces: Iterable[np.ndarray], codecs: Sequence[Codec]) -> Finding:
    """Looks at an array of `count` elements through `pieces`, 1-D arrays of a type that codecs take.

    Statistics are float64; what codecs encode is float32, as on the wire.
    """
    finding = Finding(name, dtype, count, losses=[Loss(codec.name) for codec in codecs])
    for piece in _joined(pieces):
        values = to_float32(piece).astype(np.float64) if piece.dtype == BFLOAT16 else piece.astype(np.float64)
        finite = np.isfinite(values)
        _describe(finding, values, finite)
        for codec, loss in zip(codecs, finding.losses, strict=True):
            encoded = codec.encode(piece, seed=finding.seen)
            out = np.float64 if piece.dtype == np.float64 else np.float32
            # "none" decodes to what it encoded; the others to the type that all arithmetic has.
            decoded = codec.decode(encoded, piece.size, dtype=piece.dtype if codec.lossless else out)
            restored = to_float32(decoded) if decoded.dtype == BFLOAT16 else decoded
            _compare(loss, encoded.size, values, finite, restored.astype(np.float64))
    return finding


def _joined(pieces: Iterable[np.ndarray]) -> Iterable[np.ndarray]:
    """Short pieces together, up to `PIECE_ELEMENTS`: a codec's padding and the cost of a call should not show."""
    waiting: list[np.ndarray] = []
    for piece in pieces:
        waiting.append(piece)
        if sum(each.size for each in waiting) >= PIECE_ELEMENTS:
            yield np.concatenate(waiting)
            waiting.clear()
    if waiting:
        yield np.concatenate(waiting)


def _describe(finding: Finding, values: np.ndarray, finite: np.ndarray) -> None:
    magnitudes = np.abs(values[finite])
    nonzero = magnitudes[magnitudes > 0]
    finding.seen += values.size
    finding.nonfinite += values.size - magnitudes.size
    finding.zeros += magnitudes.size - nonzero.size
    if nonzero.size:
        finding.smallest = min(finding.smallest, float(nonzero.min()))
        finding.largest = max(finding.largest, float(nonzero.max()))


def _compare(loss: Loss, encoded_bytes: int, values: np.ndarray, finite: np.ndarray, decoded: np.ndarray) -> None:
    usable = finite & np.isfinite(decoded)
    before, after = values[usable], decoded[usable]
    error = after - before
    loss.encoded_bytes += encoded_bytes
    loss.elements += values.size
    loss.spoiled += int(finite.sum() - usable.sum())
    loss.nonzero += int(np.count_nonzero(before))
    loss.zeroed += int(np.count_nonzero((before != 0) & (after == 0)))
    with np.errstate(over="ignore"):  # squares of float64 elements that no float32 holds, which come back as infinities
        loss.square_sum += float(before @ before)
        loss.square_error += float(error @ error)
        loss.magnitude_sum += float(np.abs(before).sum())
        loss.decoded_sum += float(np.abs(after).sum())


def advise(finding: Finding, codecs: Sequence[Codec], wanted: str, limits: Limits) -> Advice:
    """The codec `wanted` if the array stays within the limits with it, else the one of fewest bits with which it does.

    Arrays with NaNs or infinities are of steps that training skips: nothing is said against a codec because of them.
    """
    if finding.nonfinite:
        return Advice(wanted, None)
    trouble = _trouble(finding.loss(wanted), limits)
    if trouble is None:
        return Advice(wanted, None)
    suited = [codec for codec in codecs if codec.lossless or _trouble(finding.loss(codec.name), limits) is None]
    best = min(suited, key=lambda codec: (finding.loss(codec.name).bits, not codec.lossless), default=None)
    return Advice("none" if best is None else best.name, trouble)


def _trouble(loss: Loss, limits: Limits) -> str | None:
    snr_db, bias = loss.snr_db, loss.bias
    if loss.spoiled:
        return f"{loss.spoiled} finite elements come back as NaN or infinity"
    if snr_db is not None and not snr_db >= limits.min_snr_db:
        return f"SNR of {snr_db:.1f} dB, below {limits.min_snr_db:g}"
    if bias is not None and not abs(bias) <= limits.max_bias + _CHANCE * loss.bias_by_chance:
        return f"mean magnitude changes by {100 * bias:+.2g} %"
    if loss.zeroed_share > limits.max_zeroed:
        return f"{100 * loss.zeroed_share:.3g} % of the elements other than 0 vanish"
    return None
