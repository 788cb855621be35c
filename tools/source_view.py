"""Lays the sources out as an installed package has them, for tools that follow directories rather than imports.

`kernels/` and `transport/` are installed as `squinchcomm.kernels` and `squinchcomm.transport`, which mypy and
import-linter cannot know from the tree. The view is a tree of directories whose files are links to the sources:

    python tools/source_view.py build/view
    python tools/source_view.py build/view --run mypy build/view/squinchcomm   # with paths in its output set right
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE_DIRS = {"squinchcomm": "squinchcomm", "kernels": "squinchcomm/kernels", "transport": "squinchcomm/transport"}


def build(view: Path) -> None:
    """Makes `view` anew from the sources."""
    shutil.rmtree(view, ignore_errors=True)
    for source, target in PACKAGE_DIRS.items():
        for path in (ROOT / source).rglob("*"):
            if path.suffix not in {".py", ".pyi"} and path.name != "py.typed":
                continue
            link = view / target / path.relative_to(ROOT / source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)


def run(view: Path, command: list[str]) -> int:
    """Runs `command` on the view and prints its output with the paths of the sources. Returns its exit status."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout
    for source, target in sorted(PACKAGE_DIRS.items(), key=lambda item: -len(item[1])):
        output = output.replace(f"{view}/{target}/", f"{source}/")
    sys.stdout.write(output)
    sys.stderr.write(done.stderr)
    return done.returncode


def main(arguments: list[str]) -> int:
    """Command line: VIEW, or VIEW --run COMMAND..."""
    view = Path(arguments[0])
    if arguments[1:2] == ["--run"]:
        return run(view, arguments[2:])
    build(view)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
