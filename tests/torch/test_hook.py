"""The DDP communication hook in worlds of real processes; what is checked stands in hook_checks.py."""

from __future__ import annotations

import pytest

from tests.torch.hook_world import World, checks

CHECKS = "tests.torch.hook_checks"


@pytest.fixture(scope="module", params=[2, 3, 4])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(CHECKS, request.param, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("name", checks(CHECKS))
def test_over_gloo(world: World, name: str) -> None:
    world.verify(name)


def test_processes_end_well(world: World) -> None:
    world.verify_end()
