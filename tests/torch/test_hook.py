"""The DDP communication hook in worlds of real processes; what is checked stands in hook_checks.py and feedback_checks.py."""

from __future__ import annotations

import pytest

from tests.torch.hook_world import Checks, names_of

CHECKS = ("tests.torch.hook_checks", "tests.torch.feedback_checks")


@pytest.fixture(
    scope="module",
    params=["gloo-3", "squinch-2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gloo-2", "gloo-4", "squinch-3"))],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checks:
    backend, ranks = request.param.split("-")
    return Checks(CHECKS, int(ranks), tmp_path_factory.mktemp("world"), backend)


@pytest.mark.parametrize("name", names_of(*CHECKS))
def test_hook(world: Checks, name: str) -> None:
    world.verify(name)
