"""Ways to average gradients that the training benchmark compares, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

POWERSGD_RANK = 4


@dataclass(frozen=True)
class Contender:
    """DDP over a backend, with a communication hook or without.

    Attributes:
        backend: gloo or squinch; squinch compresses by itself unless a hook is named.
        hook: None, "bf16" and "powersgd" of PyTorch, or "compress", which is `squinchcomm.torch.compress_hook`.
        codec: Of `compress_hook`.
        error_feedback: As well.
        encrypted: Whether the backend squinch encrypts; gloo never does.
    """

    backend: str
    hook: str | None = None
    codec: str = "squinch6"
    error_feedback: bool = False
    encrypted: bool = False

    @property
    def text(self) -> str:
        """In words, for reports."""
        if self.hook is None:
            return f"{self.backend}, no hook" + (", 6 bits, encrypted" if self.encrypted else "")
        names = {"bf16": "bf16_compress_hook", "powersgd": f"powerSGD_hook, rank {POWERSGD_RANK}"}
        feedback = ", error_feedback=True" if self.error_feedback else ""
        return f"{self.backend}, {names.get(self.hook, f'compress_hook, codec={self.codec}{feedback}')}"


CONTENDERS = {
    "gloo-f32": Contender("gloo"),
    "gloo-bf16": Contender("gloo", "bf16"),
    "powersgd": Contender("gloo", "powersgd"),
    "squinch": Contender("squinch"),
    "squinch-encrypted": Contender("squinch", encrypted=True),
    "hook-gloo": Contender("gloo", "compress"),
    "hook-squinch": Contender("squinch", "compress"),
    "hook-sr": Contender("gloo", "compress", "squinch6-sr"),
    "hook-feedback": Contender("gloo", "compress", error_feedback=True),
}
BASE, HALF = "gloo-f32", "gloo-bf16"
OF_STEPS = ("gloo-f32", "gloo-bf16", "powersgd", "squinch", "squinch-encrypted", "hook-gloo", "hook-squinch")
OF_LOSSES = ("gloo-f32", "gloo-bf16", "powersgd", "squinch", "hook-gloo", "hook-sr", "hook-feedback")


def wrapped(
    name: str,
    model: Any,
    group: Any,
    *,
    powersgd_start: int,
    seed: int = 0,
    bucket_cap_mb: float | None = None,
    gradient_as_bucket_view: bool = False,
) -> Any:
    """`model` in DistributedDataParallel as contender `name` has it. A collective call.

    Args:
        powersgd_start: Steps before PowerSGD starts to compress; at least 2.
        seed: Of random numbers in hooks.
        bucket_cap_mb, gradient_as_bucket_view: DDP's.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    from squinchcomm.torch import CompressState, compress_hook

    contender = CONTENDERS[name]
    # The calls that PowerSGD chains come in an order of their own on each rank over gloo, unless there is one bucket only.
    bucket_mb = _size_mb(model) if contender.hook == "powersgd" else bucket_cap_mb
    ddp = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=gradient_as_bucket_view
    )
    if contender.hook == "bf16":
        # In a lambda, because DDP refuses a hook of that name without CUDA; gloo can do it.
        ddp.register_comm_hook(group, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))  # noqa: PLW0108
    elif contender.hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=powersgd_start, random_seed=seed
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif contender.hook == "compress":
        ours = CompressState(contender.codec, contender.error_feedback, group, module=ddp, seed=seed)
        ddp.register_comm_hook(ours, compress_hook)
    return ddp


def _size_mb(model: Any) -> int:
    return 1 + int(sum(parameter.nbytes for parameter in model.parameters())) // 2**20
