"""torch.distributed over squinchcomm: importing this makes `torch.distributed.init_process_group("squinch")` work."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from squinchcomm.torch.guards import compressed as compressed
from squinchcomm.torch.guards import lossless as lossless
from squinchcomm.torch.options import Options as Options
from squinchcomm.torch.registration import register as register

if TYPE_CHECKING:
    from squinchcomm.torch.fsdp import compress_fsdp as compress_fsdp
    from squinchcomm.torch.hook import CompressState as CompressState
    from squinchcomm.torch.hook import compress_hook as compress_hook

register()

# Imported when first asked for: they load the codecs and FSDP.
_LATER = {"CompressState": "hook", "compress_hook": "hook", "compress_fsdp": "fsdp"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
