"""One rank of the link benchmark: obeys commands on stdin, a JSON line each, and answers on stdout the same way.

It holds a gloo group and a squinchcomm communicator at once, so that all contenders run in the same processes on the same links.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

SEED = 20
_CHUNK = 1 << 20  # elements whose random numbers are drawn at once


class Rank:
    """State of one rank between commands; each public method is a command, its keywords the command's fields."""

    def __init__(self, *, rank: int, world_size: int, host: str, gloo: str, squinch: str, interface: str) -> None:
        self.rank, self.world_size, self.host = rank, world_size, host
        self.gloo_address, self.squinch_address, self.interface = gloo, squinch, interface
        self.comm: Any = None
        self.flat: Any = None  # as `comm`, with the flat algorithm
        self.auto: Any = None  # as `comm`, with the codec "auto"
        self.dist: Any = None
        self.count = 0

    def open_gloo(self) -> None:
        """Joins the gloo group, which also gives the barrier of all measurements."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        dist.init_process_group("gloo", init_method=self.gloo_address, rank=self.rank, world_size=self.world_size)
        self.dist = dist

    def open_squinch(self, *, link_rate: str | None = None) -> None:
        """Joins the communicator, anew if there is one."""
        if self.comm is not None:
            self.comm.close()
        self.comm = self._init(link_rate=link_rate)

    def open_flat(self) -> None:
        """Joins another one that never combines inside hosts first."""
        self.flat = self._init(algorithm="flat")

    def open_auto(self, *, link_rate: str | None = None) -> dict[str, Any]:
        """Joins another one that chooses codecs, anew if there is one, since it measures the link then; the choice by size."""
        if self.auto is not None:
            self.auto.close()
        start = time.perf_counter()
        self.auto = self._init(codec="auto", link_rate=link_rate)
        return {"crossover": repr(self.auto.crossover), "seconds": time.perf_counter() - start}

    def _init(self, **settings: Any) -> Any:
        import squinchcomm

        return squinchcomm.init(
            rank=self.rank,
            world_size=self.world_size,
            address=self.squinch_address,
            security="none",
            host=self.host,
            interface=self.interface,
            **settings,
        )

    def first_call(self) -> None:
        """Joins the communicator and runs one compressed all-reduce of 1 MiB."""
        self.open_squinch()
        self.comm.allreduce(np.ones(1 << 18, np.float32), codec="squinch6")

    def load(self, *, count: int) -> None:
        """Makes the input of `count` float32 elements."""
        self.count = count
        self.input = np.empty(count, np.float32)
        for start in range(0, count, _CHUNK):
            self.input[start : start + _CHUNK] = drawn(self.rank, start, min(_CHUNK, count - start))
        self.buffers: dict[str, Any] = {"float32": np.empty(count, np.float32)}

    def measure(self, *, contenders: list[str], repeats: int, check: bool) -> dict[str, Any]:
        """Runs each contender once a repeat, in turn, after a barrier each. Moments, seconds, interface bytes, a check."""
        starts: dict[str, list[float]] = {name: [] for name in contenders}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        sent: dict[str, list[int]] = {name: [] for name in contenders}
        checks = {}
        for repeat in range(repeats):
            turn = repeat % len(contenders)
            for name in contenders[turn:] + contenders[:turn]:
                call, result = self._prepare(name)
                self._barrier()
                bytes_before, start = self._sent_bytes(), time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
                starts[name].append(start)
                sent[name].append(self._sent_bytes() - bytes_before)
                if check and repeat == 0:
                    checks[name] = self._check(result())
        return {"starts": starts, "times": times, "sent": sent, "checks": checks}

    def _sent_bytes(self) -> int:
        return sent_bytes(self.interface)

    def memory(self, *, contender: str) -> dict[str, int]:
        """Bytes that one all-reduce adds to this process at its peak, beyond what it held before, the input included."""
        call, _ = self._prepare(contender)
        self._barrier()
        before = status_bytes("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # resets the peak
        call()
        return {"extra": status_bytes("VmHWM") - before}

    def close(self) -> None:
        """Leaves both groups."""
        for comm in (self.comm, self.flat, self.auto):
            if comm is not None:
                comm.close()
        if self.dist is not None:
            self.dist.destroy_process_group()

    def _barrier(self) -> None:
        if self.dist is not None:
            self.dist.barrier()
        else:
            self.comm.barrier()

    def _prepare(self, name: str) -> tuple[Callable[[], None], Callable[[], np.ndarray]]:
        """The call to time, on a fresh copy of the input, and how to get its result as float32 or float64."""
        if name == "gloo-bf16":
            import torch

            source = self.buffers.setdefault("bf16 input", torch.from_numpy(self.input).to(torch.bfloat16))
            tensor = self.buffers.setdefault("bf16", torch.empty_like(source))
            tensor.copy_(source)
            return lambda: self.dist.all_reduce(tensor), lambda: tensor.float().numpy()
        buffer = self.buffers["float32"]
        np.copyto(buffer, self.input)
        if name == "gloo-f32":
            import torch

            tensor = torch.from_numpy(buffer)
            return lambda: self.dist.all_reduce(tensor), lambda: buffer
        if name == "auto":
            return lambda: self.auto.allreduce(buffer, "sum"), lambda: buffer
        codec, _, algorithm = name.partition("/")
        comm = self.flat if algorithm == "flat" else self.comm
        return lambda: comm.allreduce(buffer, "sum", codec=codec), lambda: buffer

    def _check(self, result: np.ndarray) -> dict[str, float]:
        """This rank's share of the comparison with a float64 sum, and a checksum of the whole result."""
        square_error = square_sum = worst = 0.0
        for index, start in enumerate(range(0, self.count, _CHUNK)):
            if index % self.world_size != self.rank and self.count > _CHUNK:
                continue
            size = min(_CHUNK, self.count - start)
            inputs = [drawn(rank, start, size).astype(np.float64) for rank in range(self.world_size)]
            exact = sum(inputs[1:], inputs[0])
            error = result[start : start + size] - exact
            square_error += float(error @ error)
            square_sum += float(exact @ exact)
            worst = max(worst, float(np.abs(error).max() / max(np.abs(each).max() for each in inputs)))
        return {"square_error": square_error, "square_sum": square_sum, "worst": worst, "checksum": zlib.crc32(result.data)}


def drawn(rank: int, start: int, count: int) -> np.ndarray:
    """Elements start .. start + count of a rank's input: Gaussian, on a scale of its own every 1024 elements, as gradients have."""
    rng = np.random.default_rng((SEED, rank, start))
    values = rng.standard_normal(count, dtype=np.float32)
    scales = np.exp2(np.random.default_rng((SEED, start)).integers(-8, 1, size=-(-count // 1024))).astype(np.float32)
    return values * np.repeat(scales, 1024)[:count]


def sent_bytes(interface: str) -> int:
    """Bytes that left this namespace's interface so far, headers of all layers included."""
    with open("/proc/net/dev") as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                return int(numbers.split()[8])
    return 0


def status_bytes(field: str) -> int:
    """A size out of /proc/self/status, such as VmRSS."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


def obey(kind: Callable[..., Any]) -> None:
    """Makes a rank of this kind out of the command line and runs its methods until stdin ends, as it does when the benchmark dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark itself decides what an interrupt means
    rank = kind(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(rank, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)
    os._exit(0)  # threads of either library must not keep a rank alive that nobody listens to


if __name__ == "__main__":
    obey(Rank)
