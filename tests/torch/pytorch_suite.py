"""Runs PyTorch's own distributed suite, out of its wheel, over a backend, and writes what became of each test.

    python -m tests.torch.pytorch_suite --backend squinch --world-size 2 --out results.json [--like mpi] [TEST ...]

The suite decides which tests to run when it is imported, by the name of the backend: "only gloo supports timeouts". With
`--like gloo` (the default) it is imported under that name, so that it offers what it offers gloo, and then told the real one:
every process group it makes is of that backend. `--like mpi` offers the tests that it reserves for MPI, sub-groups of small
worlds among them.

Ranks are forked from a process that has imported everything: a test takes a second, not one import of torch a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any


def load_suite(backend: str, like: str) -> type[unittest.TestCase]:
    """The suite's test class, offering what it offers `like`, over `backend`."""
    os.environ["BACKEND"] = like
    if backend == "squinch":
        import squinchcomm.torch  # noqa: F401
    from torch.testing._internal import common_distributed

    tables = common_distributed.DistTestCases
    for feature in ("ddp", "subgroup", "plugin", "gpu", "cuda"):
        tables.backend_feature[feature] |= {backend, like}
    from torch.testing._internal.distributed import distributed_test as suite

    suite.BACKEND = backend
    if backend == "squinch":
        run_as_on_gloo(suite)

    class TestDistBackendWithFork(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._fork_processes()

        def _fork_processes(self) -> None:
            import torch

            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TestDistBackendWithFork


def run_as_on_gloo(suite: Any) -> None:
    """Takes the way of gloo where a test asks for the backend's name in order to choose between CPU and GPU."""
    base = suite.DistributedTest._DistTestBase
    original = base._test_accumulate_gradients_no_sync

    def accumulate(self: Any, *args: Any, **kwargs: Any) -> None:
        suite.BACKEND = "gloo"  # prepares a model on the CPU; the groups are there already
        original(self, *args, **kwargs)

    base._test_accumulate_gradients_no_sync = accumulate


class Outcomes(unittest.TextTestResult):
    """Keeps state, reason and seconds of each test."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table: dict[str, dict[str, Any]] = {}
        self._started = 0.0

    def startTest(self, test: Any) -> None:  # noqa: N802
        self._started = time.monotonic()
        super().startTest(test)

    def _note(self, test: Any, state: str, detail: str = "") -> None:
        seconds = round(time.monotonic() - self._started, 1)
        self.table[test._testMethodName] = {"state": state, "detail": detail[-3000:], "seconds": seconds}

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        super().addSuccess(test)
        self._note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        super().addSkip(test, reason)
        self._note(test, "skipped", reason)

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        super().addError(test, err)
        self._note(test, "failed", self.errors[-1][1])

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        super().addFailure(test, err)
        self._note(test, "failed", self.failures[-1][1])


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="squinch")
    parser.add_argument("--like", default="gloo")
    parser.add_argument("--world-size", default="2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["TEMP_DIR"] = scratch
        os.environ["INIT_METHOD"] = f"file://{scratch}/shared_init_file"
        os.environ["WORLD_SIZE"] = options.world_size
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch

        torch.set_num_threads(1)
        case = load_suite(options.backend, options.like)
        names = options.tests or unittest.TestLoader().getTestCaseNames(case)
        suite = unittest.TestSuite(case(name) for name in names)
        result = unittest.TextTestRunner(resultclass=Outcomes, verbosity=2).run(suite)
        options.out.write_text(json.dumps(result.table, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
