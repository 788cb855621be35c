"""Groups of real processes for tests of the torch backend.

Ranks are forked from a server process that has imported torch and squinchcomm.torch already, so that a world starts in a fraction
of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.torch.preload"])

Body = Callable[..., Any]


class Failed(AssertionError):
    """A rank raised; has its traceback. `when` orders several: one failure leads to others."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.when = time.monotonic()


class World:
    """Ranks as processes, each of which runs `body(rank, *args)` inside an initialised default group, or bare if not `init`."""

    def __init__(self, world_size: int, body: Body, *args: Any, init: dict[str, Any] | None = None, bare: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.processes = []
        self._pipes: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            meeting = None if bare else f"{self._folder.name}/store"
            process = _CONTEXT.Process(target=_rank_main, args=(rank, world_size, body, args, meeting, init or {}, theirs))
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def outcomes(self, timeout_s: float = 60.0) -> list[Any]:
        """What each rank returned, `Failed` if it raised, None if it died without a word; all have ended then."""
        deadline = time.monotonic() + timeout_s
        results: list[Any] = [None] * len(self._pipes)
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        try:
            while waiting:
                ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
                if not ready:
                    first = next((result for result in results if isinstance(result, Failed)), None)
                    raise first or Failed(f"ranks {sorted(waiting.values())} said nothing for {timeout_s} s; so far {results}")
                for pipe in ready:
                    rank = waiting.pop(pipe)
                    try:
                        kind, value = pipe.recv()
                    except EOFError:
                        continue
                    if kind == "failure":
                        value = Failed(f"rank {rank}: {value}")
                        deadline = min(deadline, time.monotonic() + 5)  # the others wait for it in vain
                    results[rank] = value
            for process in self.processes:
                process.join(max(0.1, deadline - time.monotonic()))
                assert process.exitcode is not None, "a rank has returned and does not end"
        finally:
            self.close()
        return results

    def close(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def run_ranks(world_size: int, body: Body, *args: Any, timeout_s: float = 60.0, **settings: Any) -> list[Any]:
    """Runs `body(rank, *args)` on each rank of a world with Options `settings`; raises the first failure."""
    results = World(world_size, body, *args, init=settings).outcomes(timeout_s)
    failures = [result for result in results if isinstance(result, Failed)]
    if failures:
        raise min(failures, key=lambda failure: failure.when)
    return results


def _rank_main(
    rank: int, world_size: int, body: Body, args: Any, meeting: str | None, settings: dict[str, Any], pipe: Connection
) -> None:
    import torch
    import torch.distributed as dist

    import squinchcomm.torch

    torch.set_num_threads(1)
    torch.manual_seed(1234 + rank)
    os.nice(5)
    try:
        if meeting is not None:
            dist.init_process_group(
                "squinch",
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=30),
                pg_options=squinchcomm.torch.Options(**settings),
            )
        result = body(rank, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(("result", result))
    except BaseException:
        pipe.send(("failure", traceback.format_exc()))
        os._exit(1)  # its peers are not to wait for an orderly end


def scratch_store(folder: str | Path, name: str) -> str:
    """An init_method of its own for a group that a test makes itself."""
    return f"file://{folder}/{name}"
