"""Worlds in which every rank runs all the checks of some modules: the functions `check_*`, in order."""

from __future__ import annotations

import importlib
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from tests.torch.ranks import World, scratch_store


class Checks:
    """What became of the modules' checks on each rank of a world."""

    def __init__(
        self, modules: Sequence[str], world_size: int, folder: Path, backend: str, only: list[str] | None = None
    ) -> None:
        store = scratch_store(folder, "store")
        self.results: list[dict[str, str]] = World(
            world_size, run_checks, world_size, modules, backend, store, only, bare=True
        ).outcomes(timeout_s=110.0)

    def verify(self, name: str) -> None:
        """Fails unless the check passed on every rank; ranks stop at the first that does not."""
        for rank, results in enumerate(self.results):
            assert results is not None, f"rank {rank} died"
            assert results.get(name) == "passed", f"rank {rank}: {results.get(name, 'not reached')}"


def names_of(*modules: str) -> list[str]:
    """The checks of modules."""
    return list(_checks_of(modules))


def _checks_of(modules: Sequence[str]) -> dict[str, Callable[[], None]]:
    loaded = [vars(importlib.import_module(module)) for module in modules]
    return {name: check for each in loaded for name, check in each.items() if name.startswith("check_")}


def run_checks(
    rank: int, world_size: int, modules: Sequence[str], backend: str, store: str, only: list[str] | None
) -> dict[str, str]:
    """One rank of a world: "passed" or a traceback by name of check."""
    import torch.distributed as dist

    warnings.simplefilter("error")
    dist.init_process_group(backend, rank=rank, world_size=world_size, init_method=store, timeout=timedelta(seconds=30))
    checks = _checks_of(modules)
    results: dict[str, str] = {}
    for name in only or checks:
        try:
            checks[name]()
            results[name] = "passed"
        except BaseException:
            results[name] = traceback.format_exc()
            break  # the others wait in vain for this rank, whose group ends now
    return results
