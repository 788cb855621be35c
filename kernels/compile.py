"""Compiles the kernel once a machine: Numba's cache on disk, and a file lock so that processes starting together do not all compile.

Numba's own cache looks at the modification time of one source file; the kernel is spread over several, so the stamp here is a hash
of all of them. If no directory can be written (neither beside the package nor the user's cache), every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_SOURCES = ("cpu.py", "float_lanes.py", "lanes.py", "squinch6_lanes.py", "squinch6_tables.py", "kinds.py", "int8.py")
_lock = threading.Lock()
_kernel: Callable[..., int] | None = None
_cache_hits = 0


def kernel() -> Callable[..., int]:
    """The compiled `cpu.transform` as a C function, which ctypes calls without the GIL. The first call imports Numba."""
    if _kernel is None:
        _load()
    assert _kernel is not None
    return _kernel


def warm_up() -> None:
    """Compiles the kernel of all built-in codecs and dtypes, or loads it from the cache: seconds the first time on a machine.

    A launcher calls it once before it starts the ranks of a machine; ranks that start together without it wait for the one that
    compiles.
    """
    kernel()


def cache_hits() -> int:
    """1 if this process loaded the kernel from the cache, 0 if it compiled it or has not needed it yet."""
    return _cache_hits


def _load() -> None:
    global _kernel, _cache_hits
    with _lock:
        if _kernel is not None:
            return
        compiled = _compiled()
        _cache_hits = compiled.cache_hits
        _kernel = compiled.ctypes


def _source_stamp() -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def _compiled() -> Any:
    from numba.core.caching import FunctionCache, IndexDataCacheFile
    from numba.core.ccallback import CFunc

    from squinchcomm.kernels import cpu

    class LockedCache(FunctionCache):
        """On a miss takes the lock, looks again, and keeps the lock until the result is saved."""

        def __init__(self, function: Any, cleanup: contextlib.ExitStack) -> None:
            super().__init__(function)
            self._cleanup = cleanup
            self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, _source_stamp())

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            found = super().load_overload(sig, target_context)
            if found is None:
                self._cleanup.enter_context(_file_lock(Path(self._cache_path) / "squinchcomm-kernels.lock"))
                found = super().load_overload(sig, target_context)
            return found

    signature = cpu.SIGNATURE
    function: Any = CFunc(cpu.transform, (signature.args, signature.return_type), {}, {"error_model": "numpy"})
    with contextlib.ExitStack() as cleanup:
        try:
            function._cache = LockedCache(cpu.transform, cleanup)
        except RuntimeError as error:
            logger.warning("squinchcomm kernels are compiled anew in every process: %s", error)
        function.compile()
    return function


@contextlib.contextmanager
def _file_lock(path: Path) -> Any:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        logger.warning("cannot lock %s, other processes may compile the same kernel: %s", path, error)
        yield
        return
    try:
        # Released by the system if the process dies.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
