"""Makes torch.distributed know the backend "squinch"."""

from __future__ import annotations

import dataclasses
import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from squinchcomm.errors import SquinchError
from squinchcomm.torch.options import Options, resolved

NAME = "squinch"


def register() -> None:
    """Registers the backend, once; called by `import squinchcomm.torch` and, from torch 2.14, through the entry point."""
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    _extend_monitored_barrier()


def create(group: Any, pg_options: Any) -> Any:
    """Makes the process group that torch.distributed asks for.

    Args:
        group: `_DistributedBackendOptions` with store, group_rank, group_size, timeout, group_id, global_ranks_in_group.
        pg_options: What the user gave, an `Options` or None.
    """
    from squinchcomm.torch.core import Core
    from squinchcomm.torch.errors import translated
    from squinchcomm.torch.join import join_group
    from squinchcomm.torch.process_group import SquinchProcessGroup

    is_default = not group.global_ranks_in_group
    options = resolved(pg_options, None if is_default else _default_options())
    config = options.config
    timeout_s = _timeout_s(group.timeout, options)
    patience_s = min(config.connect_timeout_s, timeout_s)
    joined = dataclasses.replace(config, timeout_s=timeout_s, connect_timeout_s=patience_s, sources=config.sources)
    members = group.global_ranks_in_group or range(group.group_size)
    try:
        comm = join_group(group.store, group.group_rank, members, joined)
    except SquinchError as error:
        kin = translated(error)
        raise kin from kin.__cause__
    return SquinchProcessGroup(Core(comm), group.store, group.group_id, options)


def _default_options() -> Options | None:
    """Options of the default group, if it is one of ours."""
    return getattr(dist.group.WORLD, "squinch_options", None) if dist.is_initialized() else None


def _timeout_s(timeout: timedelta, options: Options) -> float:
    """Torch's timeout, or SQUINCH_TIMEOUT if that is set and torch's is just its default."""
    config = options.config
    if timeout == default_pg_timeout and config.sources["timeout_s"] != "default":
        return config.timeout_s
    return timeout.total_seconds()


def _extend_monitored_barrier() -> None:
    """`torch.distributed.monitored_barrier` refuses all backends but gloo by name; lets it pass for groups of ours."""
    original = dist.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        chosen: Any = group if group is not None else dist.group.WORLD
        if hasattr(chosen, "squinch_options"):
            chosen.monitored_barrier(timeout, wait_all_ranks)
        else:
            original(group, timeout, wait_all_ranks)

    dist.monitored_barrier = c10d.monitored_barrier = monitored_barrier
