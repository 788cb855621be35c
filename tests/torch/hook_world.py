"""Worlds of real processes that each run many checks: starting torch takes seconds, a check takes milliseconds.

    python -m tests.torch.hook_world MODULE RANK WORLD_SIZE STORE BACKEND OUT

runs every function `check_*` of MODULE, in order, and writes to OUT what became of each. A check that fails on one rank leaves the
others waiting in a collective, so the first failure ends the process, and the group's timeout the others.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

TIMEOUT_S = 100.0


class World:
    """The checks of a module, run by `world_size` processes."""

    def __init__(self, module: str, world_size: int, folder: Path, backend: str = "gloo") -> None:
        command = [sys.executable, "-m", "tests.torch.hook_world", module]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.reports = [folder / f"rank{rank}.json" for rank in range(world_size)]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(world_size), str(folder / "store"), backend, str(self.reports[rank])],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            for rank in range(world_size)
        ]
        self.output = []
        deadline = time.monotonic() + TIMEOUT_S
        try:
            for process in processes:
                self.output.append(process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0])
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        self.exit_codes = [process.returncode for process in processes]

    def verify(self, name: str) -> None:
        """Fails unless the check passed on every rank."""
        for rank, report in enumerate(self.reports):
            results = json.loads(report.read_text()) if report.exists() else {}
            assert results.get(name) == "passed", (
                f"rank {rank}: {results.get(name, 'did not get there')}\n{self.output[rank][-3000:]}"
            )

    def verify_end(self) -> None:
        """Fails unless every process ended well, without a word of warning."""
        assert self.exit_codes == [0] * len(self.exit_codes), self.output


def checks(module: str) -> list[str]:
    """Names of a module's checks, without importing it (and torch with it)."""
    source = (Path(__file__).parent / f"{module.rsplit('.', 1)[1]}.py").read_text()
    return [line[4 : line.index("(")] for line in source.splitlines() if line.startswith("def check_")]


def main() -> None:
    module, rank, world_size, store, backend, out = sys.argv[1:]
    warnings.simplefilter("error")
    import torch
    import torch.distributed as dist

    import squinchcomm.torch  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group(
        backend, rank=int(rank), world_size=int(world_size), init_method=f"file://{store}", timeout=timedelta(seconds=30)
    )
    loaded = importlib.import_module(module)
    results: dict[str, str] = {}
    try:
        for name in checks(module):
            results[name] = "failed"
            getattr(loaded, name)()
            results[name] = "passed"
    except BaseException:
        results[name] = traceback.format_exc()
        raise
    finally:
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
