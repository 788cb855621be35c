"""The kernel is compiled once a machine, and found again by later processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from squinchcomm.kernels import compile as kernel_compile

SCRIPT = """
import numpy as np
from squinchcomm.kernels import compile, get_codec, warm_up
warm_up()
codec = get_codec("squinch6")
assert codec.decode(codec.encode(np.ones(600, np.float32)), 600)[599] == codec.decode(codec.encode(np.ones(1, np.float32)), 1)[0]
print(compile.cache_hits())
"""


def _start(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    return subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True)


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    processes = [_start(tmp_path) for _ in range(3)]
    hits = [int(process.communicate(timeout=100)[0]) for process in processes]
    assert sorted(hits) == [0, 1, 1]
    assert all(process.returncode == 0 for process in processes)


def test_stamp_covers_every_source_of_the_kernel() -> None:
    """A change of any file the kernel is made of must not find the old code in the cache."""
    script = "import sys; import squinchcomm.kernels.cpu; print(*sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()
    prefix = "squinchcomm.kernels."
    modules = {name.removeprefix(prefix) + ".py" for name in loaded if name.startswith(prefix)}
    contract = {"codec.py", "dtypes.py", "arguments.py", "kernel_codec.py", "compile.py", "registry.py"}
    codecs = {"none.py", "bf16.py", "squinch6.py"}
    assert modules - contract - codecs == set(kernel_compile._SOURCES)


def test_nothing_writable_means_a_compilation_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from numba.core import caching
    from numba.core.ccallback import CFunc

    def refuse(self: object, function: object) -> None:
        raise RuntimeError("no locator available")

    monkeypatch.setattr(caching.FunctionCache, "__init__", refuse)
    monkeypatch.setattr(CFunc, "compile", lambda self: None)
    kernel_compile._compiled()
    assert "no locator available" in caplog.text


@pytest.mark.slow
def test_a_processor_without_extensions(tmp_path: Path) -> None:
    """Neither AVX nor float16 instructions: other code, the same bits."""
    tests = [str(Path(__file__).with_name("test_conformance.py")), str(Path(__file__).with_name("test_squinch6.py"))]
    environment = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
