"""`compressed()` and `lossless()`: what the calls inside a block ask for, whatever the group's settings say.

A guard holds for the calls that its thread makes, and for those that autograd makes in its own threads for a backward pass started
inside the block: torch hands its thread-local objects over to them, so the guard is kept as one of those. A thread that the
block itself starts has no guard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from squinchcomm.errors import ConfigError
from squinchcomm.policy import AUTO

_KEY = "squinchcomm.guard"


class Guard(NamedTuple):
    """What a block asks for: a codec (None is the group's) for reductions, and for gathered tensors if `all_gather`."""

    lossless: bool
    codec: str | None = None
    all_gather: bool = False


def current_guard() -> Guard | None:
    """The innermost guard around this call, or None."""
    if not torch._C._is_key_in_tls(_KEY):
        return None
    guard: Guard | None = torch._C._get_obj_in_tls(_KEY)
    return guard


@contextmanager
def compressed(codec: str | None = None, *, all_gather: bool = False) -> Iterator[None]:
    """Inside, sums and averages of floating-point tensors are compressed, also where the group's `compress` is "explicit".

    What cannot be compressed (other types and operations, small tensors) stays lossless; `compress="off"` overrules.

    Args:
        codec: Codec to use, "squinch6" for one; None takes the group's.
        all_gather: Compress what `all_gather` moves as well: parameters, as a rule.

    Raises:
        ConfigError: the codec does not exist.
    """
    if codec not in (None, AUTO):
        from squinchcomm.kernels import get_codec

        get_codec(codec)
    if not isinstance(all_gather, bool):
        raise ConfigError(f"all_gather must be True or False, not {all_gather!r}")
    with _holding(Guard(False, codec, all_gather)):
        yield


@contextmanager
def lossless() -> Iterator[None]:
    """Inside, nothing is compressed: for large sums that are no gradients, such as activations and logits."""
    with _holding(Guard(True)):
        yield


@contextmanager
def _holding(guard: Guard) -> Iterator[None]:
    before = current_guard()
    torch._C._stash_obj_in_tls(_KEY, guard)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_KEY, before)
