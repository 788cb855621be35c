"""One rank of the training benchmark: obeys commands on stdin, a JSON line each, and answers on stdout the same way."""

from __future__ import annotations

import hashlib
import math
import os
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from links_rank import obey, sent_bytes
from training_contenders import BASE, CONTENDERS, wrapped

import squinchcomm.torch
from squinchcomm.demo import corpus
from squinchcomm.demo.model import ByteTransformer

_PATIENCE = timedelta(seconds=120)


class Rank:
    """State of one rank between commands; each public method is a command, its keywords the command's fields."""

    def __init__(self, *, rank: int, world_size: int, host: str, gloo: str, squinch: str, interface: str) -> None:
        del squinch  # groups of that backend meet through torch's store
        self.rank, self.world_size, self.host, self.interface = rank, world_size, host, interface
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        dist.init_process_group("gloo", init_method=gloo, rank=rank, world_size=world_size, timeout=_PATIENCE)
        self.groups: dict[str, Any] = {"gloo": dist.group.WORLD}
        self.text = corpus.load()

    # --- times of steps -------------------------------------------------------------------------------------------------

    def open_models(
        self, *, contenders: list[str], ddp: dict[str, Any], width: int, layers: int, length: int, batch: int
    ) -> dict[str, Any]:
        """A model for each contender, all alike, warmed up; whether their gradients are right."""
        self.shape = {"sequences": batch, "length": length}
        self.models = {}
        for name in contenders:
            model = ByteTransformer(width=width, layers=layers, heads=4, length=length, seed=0)
            self.models[name] = wrapped(name, model, self._group(name), powersgd_start=2, **ddp)
        for name in contenders:
            for _ in range(4):  # DDP orders its buckets after the first, PowerSGD starts with the third
                self._step(name, sync=True)
        return {"parameters": _size(self.models[contenders[0]]), "checks": {name: self._check(name) for name in contenders}}

    def time_round(self, *, contenders: list[str]) -> dict[str, list[float]]:
        """For each contender seconds of forward and backward with averaging and without, and bytes sent in the former."""
        found = {}
        for name in contenders:
            before = sent_bytes(self.interface)
            sync_s = self._step(name, sync=True)
            sent = sent_bytes(self.interface) - before
            found[name] = [sync_s, self._step(name, sync=False), sent]
        return found

    def _step(self, name: str, *, sync: bool) -> float:
        model = self.models[name]
        model.zero_grad()
        tokens = self._tokens(np.random.default_rng(self.rank), **self.shape)
        dist.barrier()
        start = time.perf_counter()
        with nullcontext() if sync else model.no_sync():
            model(tokens).backward()
        return time.perf_counter() - start

    def _check(self, name: str) -> dict[str, Any]:
        """Relative error of the averaged gradients against float32 ones of the first contender, and a digest of their bits."""
        self._step(name, sync=True)
        mine = [parameter.grad for parameter in self.models[name].parameters()]
        self.exact = mine if name == BASE else getattr(self, "exact", mine)
        error = sum(float((a - b).double().square().sum()) for a, b in zip(mine, self.exact, strict=True))
        norm = sum(float(each.double().square().sum()) for each in self.exact)
        return {"error": math.sqrt(error / norm), "digest": _digest(mine)}

    # --- losses ---------------------------------------------------------------------------------------------------------

    def begin(self, *, contender: str, seed: int, settings: dict[str, Any]) -> None:
        """Makes the model and the optimizer of one training."""
        self.settings, self.seed, self.step = settings, seed, 0
        model = ByteTransformer(
            width=settings["width"], layers=settings["layers"], heads=4, length=settings["length"], seed=seed
        )
        self.ddp = wrapped(contender, model, self._group(contender), powersgd_start=max(2, settings["steps"] // 10), seed=seed)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
        self.rng = np.random.default_rng((seed, self.rank))

    def advance(self, *, steps: int) -> float:
        """Trains on; this rank's mean training loss."""
        losses = []
        for _ in range(steps):
            for parameters in self.optimizer.param_groups:
                parameters["lr"] = _learning_rate(self.step, self.settings)
            loss = self.ddp(self._tokens(self.rng, self.settings["batch"], self.settings["length"]))
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            losses.append(loss.item())
        return float(np.mean(losses))

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any]:
        """Sum of losses over this rank's share of all held-out text, pieces in it, and a digest of the parameters."""
        length = self.settings["length"]
        whole = self.text.held_out[: self.text.held_out.size // (length + 1) * (length + 1)].reshape(-1, length + 1)
        mine = whole[self.rank :: self.world_size].astype(np.int64)
        parts = [torch.from_numpy(mine[start : start + 64]) for start in range(0, len(mine), 64)]
        total = sum(self.ddp.module(part).item() * len(part) for part in parts)
        return {"loss": total, "pieces": len(mine), "digest": _digest(self.ddp.parameters())}

    def _tokens(self, rng: np.random.Generator, sequences: int, length: int) -> torch.Tensor:
        return torch.from_numpy(corpus.batch(self.text.train, rng, sequences, length))

    def _group(self, name: str) -> Any:
        """The contender's group: one a backend and way of compressing, shared by those that come after."""
        contender = CONTENDERS[name]
        if contender.backend == "gloo":
            return self.groups["gloo"]
        compress = "auto" if contender.hook is None else "explicit"
        security = "auto" if contender.encrypted else "none"
        key = f"{compress} {security}"
        if key not in self.groups:
            options = squinchcomm.torch.Options(
                codec=contender.codec, compress=compress, security=security, host=self.host, interface=self.interface
            )
            self.groups[key] = dist.new_group(backend="squinch", pg_options=options, timeout=_PATIENCE)
        return self.groups[key]


def _learning_rate(step: int, settings: dict[str, Any]) -> float:
    """Linear warm-up over a twentieth of the steps, then a cosine down to 0."""
    steps, peak = int(settings["steps"]), float(settings["learning_rate"])
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def _size(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _digest(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    obey(Rank)
