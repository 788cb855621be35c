"""The FSDP2 adapter, and mixed precision, in worlds of real processes; what is checked stands in fsdp_checks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torch.hook_world import Checks, names_of

CHECKS = ("tests.torch.fsdp_checks",)


@pytest.fixture(
    scope="module", params=["gloo-2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gloo-4", "squinch-3"))]
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checks:
    backend, ranks = request.param.split("-")
    return Checks(CHECKS, int(ranks), tmp_path_factory.mktemp("world"), backend)


@pytest.mark.parametrize("name", names_of(*CHECKS))
def test_fsdp(world: Checks, name: str) -> None:
    world.verify(name)


@pytest.mark.parametrize("backend", ["gloo", pytest.param("squinch", marks=pytest.mark.slow)])
def test_hybrid_sharding(tmp_path: Path, backend: str) -> None:
    Checks(CHECKS, 4, tmp_path, backend, ["check_hybrid_sharding"]).verify("check_hybrid_sharding")
