"""Everything squinchcomm raises on purpose: one base, each error also a standard-library kin."""

from __future__ import annotations


class SquinchError(Exception):
    """Base of all errors of this package.

    Attributes:
        rank: The rank that raised, if known.
        peer: The other rank concerned, if any.
        op: Name of the collective or call, if any.
        sequence: Number of the collective in its communicator, if any.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        op: str | None = None,
        sequence: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.op = op
        self.sequence = sequence

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self.args, self.__dict__)


class PeerLost(SquinchError, ConnectionError):
    """A peer's process died, its connection broke, or it stopped answering."""


class CollectiveTimeout(SquinchError, TimeoutError):
    """A call did not finish before its deadline."""


class CommunicatorAborted(SquinchError, RuntimeError):
    """The communicator was aborted, closed or broken by an earlier failure."""


class MismatchError(SquinchError, ValueError):
    """Two ranks made different calls where the same call was due."""


class WireFormatError(SquinchError, ValueError):
    """Received or stored bytes are not what their header or plan says."""


class ConfigError(SquinchError, ValueError):
    """A setting or an argument is wrong."""
