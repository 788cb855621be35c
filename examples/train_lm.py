"""Trains a byte-level GPT of 10.8 M parameters on real text, with DistributedDataParallel or FSDP2.

    python examples/train_lm.py                                                    # one process
    torchrun --nproc-per-node 4 examples/train_lm.py                               # float32 gradients over gloo
    torchrun --nproc-per-node 4 examples/train_lm.py --backend squinch             # 6-bit gradients, nothing else to do
    torchrun --nproc-per-node 4 examples/train_lm.py --hook squinch6 --error-feedback      # the same over gloo, by DDP hook
    torchrun --nproc-per-node 4 examples/train_lm.py --backend squinch --fsdp
    torchrun --nproc-per-node 4 examples/train_lm.py --checkpoints run1            # the same again goes on where it ended

It computes on CPUs. On one machine the network is not what training waits for; SQUINCH_LINK_RATE=1Gbit gives the backend squinch a
slow one.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import shutil
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from squinchcomm.torch import CompressState, Options, compress_fsdp, compress_hook


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gloo", "squinch"), default="gloo")
    parser.add_argument("--hook", choices=("none", "bf16", "powersgd", "squinch6", "squinch6-sr"), default="none")
    parser.add_argument("--error-feedback", action="store_true", help="of --hook squinch6 or squinch6-sr")
    parser.add_argument("--fsdp", action="store_true", help="shard parameters with FSDP2; --hook becomes its counterpart there")
    parser.add_argument("--text", type=Path, help="file to learn; by default the sources of Python's standard library")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=4, help="sequences a rank and step")
    parser.add_argument("--context", type=int, default=256, help="bytes in a sequence")
    parser.add_argument("--width", type=int, default=384, help="a multiple of 64, which is the width of a head")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--evaluate-every", type=int, default=100, help="steps between validations, and checkpoints")
    parser.add_argument("--checkpoints", type=Path, help="folder; training goes on from the newest one in it")
    options = parser.parse_args(arguments)
    if options.error_feedback and (options.fsdp or not options.hook.startswith("squinch6")):
        parser.error("--error-feedback belongs to --hook squinch6 or squinch6-sr, without --fsdp")
    if options.hook == "powersgd" and (options.fsdp or options.checkpoints):
        parser.error("PowerSGD is a hook of DDP, and what it carries from step to step is not in checkpoints here")
    if options.width <= 0 or options.width % 64:
        parser.error(f"--width {options.width} is not a multiple of 64")
    return options


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """Takes (batch, context + 1) bytes and returns the mean cross-entropy of each next byte, in nats."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, options.width)
        self.position = nn.Embedding(options.context, options.width)
        self.blocks = nn.ModuleList(Block(options.width) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("out.weight", "feed.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * options.layers) if deep else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


class Text:
    """Random pieces of a text, of which the last twentieth is only for validation."""

    def __init__(self, path: Path | None, context: int) -> None:
        files = [path] if path else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        data = np.frombuffer(b"\n".join(file.read_bytes() for file in files), dtype=np.uint8)
        self.train, self.held_out = np.split(data, [data.size * 19 // 20])
        self.context = context
        if self.held_out.size <= context + 1:
            raise SystemExit(f"{path or 'the standard library'}: {data.size} bytes are too few for --context {context}")

    def batch(self, size: int, *key: int, held_out: bool = False) -> torch.Tensor:
        """(size, context + 1) int64; the same for the same key, so that a resumed run sees what it would have seen."""
        data = self.held_out if held_out else self.train
        starts = np.random.default_rng(key).integers(0, data.size - self.context, size)
        return torch.from_numpy(np.stack([data[start : start + self.context + 1] for start in starts]).astype(np.int64))


def distribute(model: nn.Module, options: argparse.Namespace) -> tuple[nn.Module, CompressState | None]:
    """The model in DDP or FSDP2, its gradients sent as --hook says; and the state that the hook carries along."""
    ours = options.hook.startswith("squinch6")
    if options.fsdp:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if options.hook == "bf16" else None)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        if ours:
            compress_fsdp(model, codec=options.hook, seed=options.seed)
        return model, None
    # Over gloo PowerSGD needs all gradients in one bucket: the calls of several would come in different orders on different ranks.
    one_bucket_mb = 1 + sum(parameter.nbytes for parameter in model.parameters()) // 2**20
    # Compressed buckets are through so soon that smaller ones than torch's are better; see docs/torch.md.
    bucket_mb = one_bucket_mb if options.hook == "powersgd" else 13
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    state = None
    if ours:
        state = CompressState(options.hook, options.error_feedback, module=ddp, seed=options.seed)
        ddp.register_comm_hook(state, compress_hook)
    elif options.hook == "powersgd":
        start = max(2, options.steps // 10)
        powersgd = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=start)
        ddp.register_comm_hook(powersgd, powerSGD_hook.powerSGD_hook)
    elif options.hook == "bf16":
        # In a lambda, because DDP refuses this hook by its name where there is no CUDA; gloo and squinch can do it.
        ddp.register_comm_hook(None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))  # noqa: PLW0108
    return ddp, state


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warm_up = max(1, options.steps // 20)
    progress = max(0, step - warm_up) / max(1, options.steps - warm_up)
    return options.learning_rate * min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * progress))


@torch.no_grad()
def validate(model: nn.Module, text: Text, options: argparse.Namespace) -> float:
    """Mean loss over pieces of the held-out text, other ones on each rank and the same at every call."""
    batches = [text.batch(8, options.seed, dist.get_rank(), number, held_out=True) for number in range(4)]
    return mean_over_ranks(sum(model(batch).item() for batch in batches) / len(batches))


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def log(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, hook: CompressState | None) -> dict:
    """What a checkpoint holds; the hook's residuals are each rank's own."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments} | ({f"hook-{dist.get_rank()}": hook.state_dict()} if hook else {})


def newest(folder: Path) -> Path | None:
    return max(folder.glob("step-????????"), default=None)


def save(folder: Path, step: int, state: dict) -> None:
    """Writes a checkpoint; the one before is only removed when this one is complete."""
    before, partial = newest(folder), folder / f"step-{step:08}.partial"
    dcp.save(state, checkpoint_id=partial)
    if dist.get_rank() == 0:
        partial.rename(folder / f"step-{step:08}")
        if before:
            shutil.rmtree(before)
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, hook: CompressState | None) -> int:
    """Restores all of it; returns the steps that have been made."""
    state = everything(model, optimizer, hook)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if hook:
        hook.load_state_dict(state[f"hook-{dist.get_rank()}"])
    return int(path.name.removeprefix("step-"))


def digest(model: nn.Module) -> bytes:
    """Of all parameters' bits."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found.update(whole.detach().numpy().tobytes())
    return found.digest()


def main(arguments: list[str] | None = None) -> tuple[float, bytes]:
    """Trains; returns the last validation loss and a digest of the parameters."""
    options = parse(arguments)
    # A hook compresses by itself, so the backend is to leave alone what it sends.
    settings = Options(compress="auto" if options.hook == "none" else "explicit") if options.backend == "squinch" else None
    # torchrun says in the environment who this is. Without it there is one process.
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(options.backend, pg_options=settings, **alone)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = Text(options.text, options.context)
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(True)
    model, hook = distribute(GPT(options), options)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)

    # One backward pass whose gradients are thrown away: kernels are loaded, and DDP puts its buckets into the order that it then keeps, so
    # that a run that goes on from a checkpoint has the same buckets, and the same bits, as one that was never interrupted.
    model(text.batch(options.batch, options.seed)).backward()
    optimizer.zero_grad()
    step, checkpoint = 0, newest(options.checkpoints) if options.checkpoints else None
    if checkpoint:
        step = load(checkpoint, model, optimizer, hook)
    size = sum(parameter.numel() for parameter in model.parameters())
    log(f"{size / 1e6:.2f} M parameters, {world_size} ranks, backend {options.backend}, hook {options.hook}, from step {step}")
    if step >= options.steps:
        log(f"nothing left to do: the checkpoint has {step} of {options.steps} steps")

    validation, losses, seconds = math.nan, [], 0.0
    while step < options.steps:
        started = time.perf_counter()
        optimizer.param_groups[0]["lr"] = learning_rate(step, options)
        loss = model(text.batch(options.batch, options.seed, rank, step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds += time.perf_counter() - started
        step += 1
        last = step == options.steps
        if step % options.log_every == 0 or last:
            mean = mean_over_ranks(sum(losses) / len(losses))
            tokens = len(losses) * world_size * options.batch * options.context
            log(f"step {step}/{options.steps}  loss {mean:.4f}  {tokens / seconds:,.0f} tokens/s")
            losses, seconds = [], 0.0
        if step % options.evaluate_every == 0 or last:
            validation = validate(model, text, options)
            log(f"step {step}/{options.steps}  validation loss {validation:.4f}")
            if options.checkpoints:
                save(options.checkpoints, step, everything(model, optimizer, hook))

    mine = torch.frombuffer(bytearray(digest(model)), dtype=torch.uint8)
    everyones = [torch.empty_like(mine) for _ in range(world_size)]
    # The handle is kept to the end: else a thread of gloo may be the last to let go of these tensors, wants the interpreter for that, and
    # hangs with this thread, which has the interpreter and ends the group.
    gathering = dist.all_gather(everyones, mine, async_op=True)
    gathering.wait()
    if not all(torch.equal(other, mine) for other in everyones):
        raise SystemExit("ranks hold different parameters")
    log("all ranks hold the same parameters")
    dist.destroy_process_group()
    return validation, bytes(mine)


if __name__ == "__main__":
    main()
