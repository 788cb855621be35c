"""What the transports may import and call, read from their source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import squinchcomm.transport.base

SOURCES = sorted(Path(squinchcomm.transport.base.__file__).parent.glob("*.py"))
ALLOWED = sys.stdlib_module_names | {"zmq", "msgspec", "mpi4py"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
FORBIDDEN_NAMES = {"eval", "exec", "__import__", "recv_pyobj", "send_pyobj", "recv_json", "recv_serialized", "loads"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_imports_little_and_runs_no_received_code(source):
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module or ""]
        else:
            modules = []
        for module in modules:
            top = module.partition(".")[0]
            assert module == "squinchcomm.errors" or top in ALLOWED - FORBIDDEN_MODULES, f"{source.name} imports {module}"
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        assert name not in FORBIDDEN_NAMES, f"{source.name} uses {name}"


def test_sources_were_found():
    assert len(SOURCES) > 8


def test_a_checkout_works_from_its_own_folder_whatever_is_installed() -> None:
    checkout = Path(__file__).parent.parent.parent
    code = f"import sys; sys.path.insert(0, {str(checkout)!r}); import squinchcomm.transport.backoff as b; print(b.__file__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == str(checkout / "transport" / "backoff.py"), done.stderr
