"""The third-party codec in docs/codecs.md passes every check, as the page says."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance import codec_checks

PAGE = Path(__file__).parents[2] / "docs" / "codecs.md"


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Any:
    blocks = PAGE.read_text().split("```python\n")[1:]
    source = next(block.split("```")[0] for block in blocks if "class Float24" in block)
    path = tmp_path_factory.mktemp("example") / "float24.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("float24", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Float24()


@pytest.mark.parametrize("check", [c for c in codec_checks.CHECKS if c not in codec_checks.BOUND_CHECKS])
def test_check(codec: Any, check: Callable[..., None]) -> None:
    check(codec)


@pytest.mark.parametrize("check", codec_checks.BOUND_CHECKS)
def test_bound(codec: Any, check: Callable[..., None]) -> None:
    check(codec, lambda values: np.abs(values.astype(np.float64)) * 2.0**-16 + 2.0**-142)
