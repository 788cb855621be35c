"""What `squinchcomm doctor` measures: codecs on one core, and frames between two processes."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from squinchcomm.cli.doctor import Finding, Probe

_ELEMENTS = 1 << 24  # 64 MiB of float32: larger than most caches
_BUDGET_S = 0.4  # a measurement
_LOOPBACK_BYTES = 32 << 20
_LOOPBACK_S = 15.0


def codecs() -> Iterator[Finding]:
    """Speed of each codec, beside that of a copy."""
    import numpy as np

    from squinchcomm.kernels import codec_names, get_codec, warm_up

    section = "Codecs (one thread, GB/s of float32)"
    start = time.perf_counter()
    warm_up()
    yield Finding(section, "kernels ready after", f"{time.perf_counter() - start:.1f} s; longer the first time on a machine")
    values = np.random.default_rng(0).standard_normal(_ELEMENTS, dtype=np.float32)
    decoded = np.empty_like(values)
    copy = _gbps(partial(np.copyto, decoded, values), values.nbytes)
    yield Finding(section, "copy", f"{copy:.2f}")
    for name in codec_names():
        codec = get_codec(name)
        encoded = codec.encode(values, seed=1)
        encode = _gbps(partial(codec.encode, values, encoded, seed=1), values.nbytes)
        decode = _gbps(partial(codec.decode, encoded, values.size, decoded), values.nbytes)
        speeds = f"encode {encode:6.2f} ({encode / copy:.2f} of a copy), decode {decode:6.2f} ({decode / copy:.2f})"
        yield Finding(section, name, f"{speeds}, {8 * encoded.nbytes / values.size:g} bits an element")


def _gbps(call: Callable[[], Any], nbytes: int) -> float:
    """GB/s of the median call of those that fit into the budget; the first, which touches new memory, does not count."""
    call()
    times: list[float] = []
    end = time.perf_counter() + _BUDGET_S
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return nbytes / statistics.median(times) / 1e9


def loopback() -> Iterator[Finding]:
    """Frames between two processes of this machine, through the whole library."""
    for scheme in ("ipc", "tcp"):
        command = ["squinchcomm", "run", "-n", "2", "--no-prefix", "--timeout", f"{_LOOPBACK_S:g}"]
        command += ["--grace", "1", "--env", f"SQUINCH_ZMQ_SCHEME={scheme}", "-m", "squinchcomm.cli.doctor_speed"]
        done = subprocess.run(
            [sys.executable, "-m", *command],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=2 * _LOOPBACK_S,
        )
        section = "Two processes on this machine"
        if done.returncode:
            why = next((line for line in reversed(done.stderr.splitlines()) if "Error" in line), done.stderr.strip()[-300:])
            yield Finding(section, scheme, f"failed: {why}", "problem", f"run `{' '.join(command)}` to see all of its output")
        else:
            found = json.loads(done.stdout)
            yield Finding(section, scheme, f"{found['GBps']:.2f} GB/s one way, {found['latency_us']:.0f} us there and back")


def _measure_loopback() -> None:
    import numpy as np

    import squinchcomm

    array, small = np.zeros(_LOOPBACK_BYTES, np.uint8), np.zeros(1, np.uint8)
    with squinchcomm.init() as comm:
        pass_on, back = (comm.send, comm.recv) if comm.rank == 0 else (comm.recv, comm.send)
        times = []
        for message, repeats in ((small, 200), (array, 5)):
            samples = []
            for _ in range(repeats):
                start = time.perf_counter()
                pass_on(message, 1 - comm.rank)
                back(small, 1 - comm.rank)
                samples.append(time.perf_counter() - start)
            times.append(statistics.median(samples))
        comm.barrier()
        if comm.rank == 0:
            print(json.dumps({"latency_us": times[0] * 1e6, "GBps": array.nbytes / times[1] / 1e9}))


PROBES: dict[str, Probe] = {"Codecs": codecs, "Two processes on this machine": loopback}

if __name__ == "__main__":
    _measure_loopback()
