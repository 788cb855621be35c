"""Settings of a process group: `pg_options`, the environment, defaults."""

from __future__ import annotations

from typing import Any

from squinchcomm.config import Config
from squinchcomm.errors import ConfigError

# Who picks this backend wants its gradients compressed.
DEFAULT_CODEC = "squinch6"


class Options:
    """Settings for `init_process_group("squinch", pg_options=...)` and `new_group(pg_options=...)`.

    What is not given comes from the SQUINCH_* environment, then from the defaults. Groups made without options take
    those of the default group.

    Args:
        codec: Codec of gradient traffic; "squinch6" if neither this nor SQUINCH_CODEC is set, "none" for none, "auto" for
            squinch6 where that is quicker than sending tensors as they are.
        compress: "auto" compresses every large float sum and average; "explicit" only the hook, the FSDP2 adapter and calls
            inside `compressed()`; "off" nothing.
        transport: How bytes travel, "zmq" for one.
        min_compress_bytes: Tensors below this size are never compressed: 65536 or "64K".
        chunk_bytes: Bytes of float32 input in a chunk of the pipeline; 0 chooses.
        interface: Network interface or address where this rank listens.
        settings: Any other field of `squinchcomm.Config`.

    Raises:
        ConfigError: a setting that does not exist, or a value that is not allowed.
    """

    def __init__(
        self,
        *,
        codec: str | None = None,
        compress: str | None = None,
        transport: str | None = None,
        min_compress_bytes: int | str | None = None,
        chunk_bytes: int | str | None = None,
        interface: str | None = None,
        **settings: Any,
    ) -> None:
        named = {
            "codec": codec,
            "compress": compress,
            "transport": transport,
            "min_compress_bytes": min_compress_bytes,
            "chunk_bytes": chunk_bytes,
            "interface": interface,
        }
        given = {**settings, **{name: value for name, value in named.items() if value is not None}}
        config = Config.from_env(**given)
        if config.sources["codec"] == "default":
            config = Config.from_env(**{**given, "codec": DEFAULT_CODEC})
        self.config = config

    def __repr__(self) -> str:
        return f"Options({self.config})"


def resolved(given: object, inherited: Options | None) -> Options:
    """The options of a new group: `given` as pg_options, else those it inherits, else environment and defaults."""
    if isinstance(given, Options):
        return given
    if given is None:
        return inherited or Options()
    raise ConfigError(f"pg_options of a squinch group must be squinchcomm.torch.Options, not {type(given).__name__}")
