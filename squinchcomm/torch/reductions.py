"""torch's reduce operations by the names that communicators know."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

_NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.PRODUCT: "product",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
    ReduceOp.PREMUL_SUM: "premul_sum",
}


class Reduction(NamedTuple):
    """A reduction: its name and, for "premul_sum", what this rank multiplies its contribution by."""

    name: str
    factor: Any = None

    def contribution(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank brings to the sum: `tensor`, or a new tensor of multiples."""
        if self.factor is None:
            return tensor
        return (tensor.detach() * self.factor).to(tensor.dtype)


_PLAIN = {op: Reduction(name) for op, name in _NAMES.items() if op != ReduceOp.PREMUL_SUM}


def reduction(op: Any) -> Reduction:
    """The reduction that `op`, a ReduceOp or one of its RedOpType, stands for.

    Raises:
        ValueError: PREMUL_SUM without a factor, or an operation that does not exist.
    """
    kind = op if isinstance(op, ReduceOp.RedOpType) else op.op
    plain = _PLAIN.get(kind)
    if plain is not None:
        return plain
    if kind != ReduceOp.PREMUL_SUM:
        raise ValueError(f"squinch has no reduction {op}; there are {', '.join(_NAMES.values())}")
    if isinstance(op, ReduceOp.RedOpType):
        raise ValueError("PREMUL_SUM needs a factor: give torch.distributed.ReduceOp.PREMUL_SUM(factor)")
    return Reduction("premul_sum", op.factor)
