"""What a failing rank tells the others, so that all raise the same named error."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from squinchcomm.errors import CollectiveTimeout, CommunicatorAborted, MismatchError, PeerLost, SquinchError, WireFormatError

_KINDS = {kind.__name__: kind for kind in (PeerLost, CollectiveTimeout, CommunicatorAborted, MismatchError, WireFormatError)}
_MAX_NOTE_CHARS = 2000


class FailureNote(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The payload of an error frame, as msgpack."""

    kind: str
    message: str
    peer: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)] | None
    op: Annotated[str, msgspec.Meta(max_length=100)] | None
    sequence: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None


def pack_failure(error: SquinchError) -> bytes:
    """The note on `error`; kinds that peers cannot have reach them as CommunicatorAborted."""
    kind = type(error).__name__
    note = FailureNote(
        kind if kind in _KINDS else "CommunicatorAborted", str(error)[:_MAX_NOTE_CHARS], error.peer, error.op, error.sequence
    )
    return msgspec.msgpack.encode(note)


def told_failure(payload: np.ndarray, rank: int, peer: int) -> SquinchError:
    """The error that `rank` raises for the note that `peer` sent; it blames whom the note blames, or else the peer.

    Raises:
        WireFormatError: the payload is no note.
    """
    try:
        note = msgspec.msgpack.decode(payload.tobytes(), type=FailureNote)
        kind = _KINDS[note.kind]
    except (msgspec.MsgspecError, KeyError) as error:
        raise WireFormatError(f"rank {peer} sent an unreadable error report: {error}", rank=rank, peer=peer) from None
    culprit = note.peer if note.peer is not None and note.peer != rank else peer
    text = f"{note.message[:_MAX_NOTE_CHARS]} [reported by rank {peer}]"
    return kind(text, rank=rank, peer=culprit, op=note.op, sequence=note.sequence)
