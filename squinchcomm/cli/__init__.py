"""The command `squinchcomm`."""

from __future__ import annotations

import os
import sys
import warnings


def main() -> None:
    """Runs the command line; errors of this package end with status 2 and say what to do, without a traceback."""
    # Here and not above: whoever imports a sibling module does not pay for the command line's libraries.
    from squinchcomm.cli.app import app
    from squinchcomm.errors import SquinchError

    warnings.showwarning = _show_warning
    try:
        app()
    except (SquinchError, OSError) as error:  # the second when output cannot be written, for one
        if os.environ.get("SQUINCH_DEBUG", "").upper() == "TRACE":
            raise
        print(f"squinchcomm: error: {error}", file=sys.stderr)
        sys.exit(2)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"squinchcomm: warning: {message}", file=sys.stderr)
