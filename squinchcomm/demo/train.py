"""Data-parallel training of the demo's model: what one rank does, from top to bottom.

Started as `squinchcomm run -n 4 -m squinchcomm.demo.train SETTINGS.json`; trains once for each codec, from the same seeds.
Rank 0 writes what the command line shows into files beside the settings.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

import squinchcomm
from squinchcomm.communicator import Communicator
from squinchcomm.demo import corpus
from squinchcomm.demo.model import ByteTransformer
from squinchcomm.demo.records import Run, Settings


def train(comm: Communicator, text: corpus.Corpus, settings: Settings, codec: str, report: Callable[[Run], None]) -> Run:
    """Trains one model on all ranks of `comm`, its gradients averaged with `codec`; calls `report` after each step."""
    model = ByteTransformer(
        width=settings.width, layers=settings.layers, heads=settings.heads, length=settings.length, seed=settings.seed
    )
    gradients = flat_gradients(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / settings.warmup_steps))
    rng = np.random.default_rng((settings.seed, comm.rank))
    run = Run(codec, parameters=gradients.numel())
    comm.barrier()
    for step in range(settings.steps):
        start = time.perf_counter()
        tokens = torch.from_numpy(corpus.batch(text.train, rng, settings.batch, settings.length))
        gradients.zero_()
        loss = model.loss(tokens)
        loss.backward()
        computed, sent_before = time.perf_counter(), comm.stats.sent_wire_bytes
        comm.allreduce(gradients, "avg", codec=codec)
        communicated = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        run.train_loss.append(loss.item())
        run.wire_bytes.append(comm.stats.sent_wire_bytes - sent_before)
        run.communication_s.append(communicated - computed)
        run.compute_s.append(time.perf_counter() - start - run.communication_s[-1])
        if (step + 1) % settings.evaluate_every == 0 or step + 1 == settings.steps:
            run.held_out_loss.append((step + 1, held_out_loss(comm, model, text, settings)))
        report(run)
    run.train_loss = averaged(comm, run.train_loss)
    run.ranks_agree = ranks_agree(comm, model)
    return run


def flat_gradients(model: torch.nn.Module) -> torch.Tensor:
    """One buffer that holds all gradients, float32, 1-D; each parameter's `grad` is a view of its piece."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    offset = 0
    for parameter in parameters:
        parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return flat


@torch.no_grad()
def held_out_loss(comm: Communicator, model: ByteTransformer, text: corpus.Corpus, settings: Settings) -> float:
    """Mean loss in nats a byte over the same held-out pieces at every call, each rank taking its share."""
    rng = np.random.default_rng((settings.seed, 1_000_000 + comm.rank))
    pieces = [corpus.batch(text.held_out, rng, 4, settings.length) for _ in range(settings.evaluation_batches)]
    losses = [model.loss(torch.from_numpy(piece)).item() for piece in pieces]
    return averaged(comm, [float(np.mean(losses))])[0]


def averaged(comm: Communicator, values: list[float]) -> list[float]:
    """Each value averaged over the ranks, losslessly."""
    array = np.array(values)
    comm.allreduce(array, "avg", codec="none")
    return [float(value) for value in array]


def ranks_agree(comm: Communicator, model: torch.nn.Module) -> bool:
    """True if all ranks hold the same bits in all parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    mine = np.frombuffer(digest.digest(), dtype=np.uint8).copy()
    everyones = np.empty((comm.world_size, mine.size), dtype=np.uint8)
    comm.all_gather(everyones.reshape(-1), mine)
    return bool((everyones == mine).all())


def main(arguments: list[str]) -> None:
    """One rank of the demo: trains with each codec in turn; rank 0 writes `progress.jsonl` and `runs.json`."""
    settings_path = Path(arguments[0])
    settings = Settings.read(settings_path)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    text = corpus.load()
    progress_path = settings_path.parent / "progress.jsonl"
    with squinchcomm.init(link_rate=settings.link_rate) as comm:

        def report(run: Run) -> None:
            if comm.rank == 0:
                with progress_path.open("a") as progress:
                    progress.write(
                        json.dumps({"codec": run.codec, "step": len(run.train_loss), "loss": run.train_loss[-1]}) + "\n"
                    )

        runs = [train(comm, text, settings, codec, report) for codec in settings.codecs]
        if comm.rank == 0:
            (settings_path.parent / "runs.json").write_text(json.dumps([asdict(run) for run in runs]))


if __name__ == "__main__":
    main(sys.argv[1:])
