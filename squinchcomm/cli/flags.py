"""Flags that several commands read alike: sizes, lists, files to write."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from squinchcomm.errors import ConfigError

_MAX_SIZES = 10_000


def sizes(first: str, last: str, factor: float, step: str | None = None) -> list[int]:
    """Sizes in bytes from `-b` to `-e`, growing by the factor `-f` or, if it is given, by `-i` bytes.

    Raises:
        ConfigError: a text is no size, the sizes do not grow, or there are more than 10,000.
    """
    from squinchcomm.config import parse_size

    numbers = {}
    for flag, text in (("-b", first), ("-e", last), ("-i", step)):
        try:
            numbers[flag] = 0 if text is None else parse_size(text)
        except ValueError as error:
            raise ConfigError(f"{flag} {text}: {error}; write bytes as 65536, 64K, 1M or 1G") from None
    size, end, increment = numbers.values()
    if end < size or (step is None and not 1 < factor < math.inf) or (step is not None and increment <= 0):
        raise ConfigError(
            f"-b {first} -e {last} -f {factor:g}: sizes must grow; -e is at least -b, -f a number above 1 and -i above 0"
        )
    found = []
    while size <= end:
        found.append(size)
        if len(found) > _MAX_SIZES:
            raise ConfigError(f"-b {first} -e {last}: more than {_MAX_SIZES} sizes; raise -f or -i")
        size = size + increment if increment else max(size + 1, int(min(size * factor, end + 1)))
    return found


def listed(flag: str, values: list[str]) -> list[str]:
    """Names of a flag that is repeatable, takes several separated by commas, or both; each once.

    Raises:
        ConfigError: there are none.
    """
    names = list(dict.fromkeys(name for value in values for name in value.split(",") if name))
    if not names:
        raise ConfigError(f"{flag} {' '.join(values)}: names nothing")
    return names


def check_writable(flag: str, path: Path) -> None:
    """Raises ConfigError unless a file can be written there: now, and not after the work is done."""
    existed = path.exists()
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: {error.strerror}; give a file in a folder that exists and may be written to"
        ) from None
    if not existed:
        path.unlink()


def check_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    """Raises ConfigError unless what `-J` and `--plot` ask for can be written, before any work is done."""
    if json_file is not None:
        check_writable("-J", json_file)
    if plot_file is None:
        return
    if plot_file.suffix.lower() != ".png":
        raise ConfigError(f"--plot {plot_file}: give a file that ends in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install with: pip install '.[demo]' in the checkout, or leave --plot out")
    check_writable("--plot", plot_file)
