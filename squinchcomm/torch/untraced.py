"""Keeps torch.compile out of the process group, as it stays out of those written in C++."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Class = TypeVar("_Class", bound=type[Any])


def untraced(kind: _Class) -> _Class:
    """Class decorator: code that is being compiled calls the methods as they are, in a break of its graph.

    `torch.compiler.disable` does that, too, and would import the compiler, which takes seconds.
    """
    skip = eval_frame._FrameAction.SKIP
    for function in vars(kind).values():
        if isinstance(function, FunctionType):
            function._torchdynamo_disable = True  # type: ignore[attr-defined]  # not to be made part of a graph
            eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return kind
