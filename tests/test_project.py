"""Rules about the tree as a whole: what may not be written, what an import may cost, what links must lead to."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_ROOTS = {"squinchcomm": "squinchcomm", "kernels": "squinchcomm.kernels", "transport": "squinchcomm.transport"}
SOURCES = [path for root in PACKAGE_ROOTS for path in sorted((ROOT / root).rglob("*.py"))]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]

# Each of these turns bytes into running code; bytes here come from a network.
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
BANNED_BUILTINS = {"eval", "exec"}
BANNED_ATTRIBUTES = {"recv_pyobj", "send_pyobj"}
BANNED_CALLS = {"torch.load"}


def banned_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of everything in `tree` that could run code received as data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] in BANNED_MODULES]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module] if module.split(".")[0] in BANNED_MODULES else []
            names += [f"{module}.{alias.name}" for alias in node.names if f"{module}.{alias.name}" in BANNED_CALLS]
        elif isinstance(node, ast.Name):
            names = [node.id] if node.id in BANNED_BUILTINS else []
        elif isinstance(node, ast.Attribute):
            names = [name for name in (node.attr, ast.unparse(node)) if name in BANNED_ATTRIBUTES | BANNED_CALLS]
        else:
            names = []
        for name in names:
            yield getattr(node, "lineno", 0), name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_turns_received_bytes_into_code(path: Path) -> None:
    assert list(banned_uses(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from marshal import loads",
        "eval('1')",
        "f = exec",
        "socket.recv_pyobj()",
        "socket.send_pyobj(1)",
        "torch.load(path)",
        "from torch import load",
    ],
)
def test_the_ban_sees(source: str) -> None:
    assert list(banned_uses(ast.parse(source)))


def test_import_is_light() -> None:
    """Users who only read `squinchcomm.__version__`, and every command line, should not wait for compilers."""
    code = "import sys, squinchcomm; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert "squinchcomm" in loaded
    assert not {"torch", "numba", "mpi4py", "zmq", "cupy", "matplotlib"} & {name.split(".")[0] for name in loaded}


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join((PACKAGE_ROOTS[root], *init.parent.relative_to(ROOT / root).parts))
        for root in PACKAGE_ROOTS
        for init in (ROOT / root).rglob("__init__.py")
    }
    assert found == set(settings["packages"])


def test_the_tests_import_these_sources() -> None:
    import squinchcomm.errors
    import squinchcomm.kernels.codec
    import squinchcomm.transport.base

    modules = [squinchcomm.errors, squinchcomm.kernels.codec, squinchcomm.transport.base]
    assert [Path(str(module.__file__)).resolve() for module in modules] == [
        ROOT / "squinchcomm" / "errors.py",
        ROOT / "kernels" / "codec.py",
        ROOT / "transport" / "base.py",
    ]


@pytest.mark.slow
def test_the_wheel_holds_everything(tmp_path: Path) -> None:
    copy, target = tmp_path / "copy", tmp_path / "target"
    for name in PACKAGE_ROOTS:
        shutil.copytree(ROOT / name, copy / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(copy)]
    subprocess.run(build, check=True, capture_output=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    code = "import squinchcomm.kernels.codec, squinchcomm.transport.base as b, squinchcomm.demo.corpus; print(b.__file__)"
    # -P and the variable: neither this tree nor the editable install may help.
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"PYTHONPATH": str(target)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert Path(done.stdout.strip()) == target / "squinchcomm" / "transport" / "base.py"
    assert not {"kernels", "transport"} & {path.name for path in target.iterdir()}


def heading_anchors(text: str) -> set[str]:
    """Anchors of the headings, formed as code hosts form them."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (anchor and anchor not in heading_anchors(target.read_text())):
            broken.append(link)
    assert broken == []


def test_the_index_has_every_document() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in re.findall(r"\]\(([^)\s]+)\)", index.read_text())}
    documents = {*index.parent.glob("*.md"), *(index.parent / "decisions").glob("*.md")} - {index}
    assert sorted(path.name for path in documents - linked) == []
