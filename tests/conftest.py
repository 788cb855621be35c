"""What all tests share: when to skip, and how hypothesis behaves."""

from __future__ import annotations

import os
import shutil

import hypothesis
import pytest

# Machines with two busy cores: a deadline per example would be noise. Derandomized: a red run can be repeated.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("default")


def missing_for_namespaces() -> str | None:
    """Why network namespaces cannot be had here, or None."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"needs {' and '.join(missing)} (Debian package iproute2)"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing_for_namespaces()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason=reason))
