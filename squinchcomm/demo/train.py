"""Data-parallel training of the demo's model: what one rank does, from top to bottom.

Started as `squinchcomm run -n 4 -m squinchcomm.demo.train SETTINGS.json`. Trains one model for each codec, all from the same seeds, taking
turns step by step, so that a slow moment of the machine hits all of them. Rank 0 writes what the command line shows into files
beside the settings.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

import squinchcomm
from squinchcomm.communicator import Communicator
from squinchcomm.demo import corpus
from squinchcomm.demo.model import ByteTransformer
from squinchcomm.demo.records import Run, Settings


class Training:
    """One model on all ranks of `comm`, its gradients averaged with `codec`; `run` holds what came of it so far."""

    def __init__(self, comm: Communicator, text: corpus.Corpus, settings: Settings, codec: str) -> None:
        self.comm, self.text, self.settings = comm, text, settings
        self.model = ByteTransformer(
            width=settings.width, layers=settings.layers, heads=settings.heads, length=settings.length, seed=settings.seed
        )
        self.gradients = flat_gradients(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / settings.warmup_steps)
        )
        self.rng = np.random.default_rng((settings.seed, comm.rank))
        self.run = Run(codec, parameters=self.gradients.numel())
        # What a first call takes once, such as loading compiled kernels, is not counted to the first step.
        comm.allreduce(self.gradients, "avg", codec=codec)

    def step(self) -> None:
        """One optimizer step on this rank's batch and everybody's gradients."""
        start = time.perf_counter()
        tokens = torch.from_numpy(corpus.batch(self.text.train, self.rng, self.settings.batch, self.settings.length))
        self.gradients.zero_()
        loss = self.model.loss(tokens)
        loss.backward()
        computed, sent_before = time.perf_counter(), self.comm.stats.sent_wire_bytes
        self.comm.allreduce(self.gradients, "avg", codec=self.run.codec)
        communicated, sent_after = time.perf_counter(), self.comm.stats.sent_wire_bytes
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.run.train_loss.append(loss.item())
        self.run.wire_bytes.append(sent_after - sent_before)
        self.run.communication_s.append(communicated - computed)
        self.run.compute_s.append(time.perf_counter() - communicated + computed - start)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Mean loss over the same held-out pieces at every call, each rank taking its share."""
        rng = np.random.default_rng((self.settings.seed, 1_000_000 + self.comm.rank))
        pieces = [
            corpus.batch(self.text.held_out, rng, 4, self.settings.length) for _ in range(self.settings.evaluation_batches)
        ]
        losses = [self.model.loss(torch.from_numpy(piece)).item() for piece in pieces]
        step = len(self.run.train_loss)
        self.run.held_out_loss.append((step, averaged(self.comm, [float(np.mean(losses))])[0]))

    def finish(self) -> Run:
        """What all ranks got together."""
        self.run.train_loss = averaged(self.comm, self.run.train_loss)
        self.run.ranks_agree = ranks_agree(self.comm, self.model)
        return self.run


def flat_gradients(model: torch.nn.Module) -> torch.Tensor:
    """One buffer that holds all gradients, float32, 1-D; each parameter's `grad` is a view of its piece."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    offset = 0
    for parameter in parameters:
        parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    return flat


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


def train(comm: Communicator, settings: Settings, progress_path: Path) -> list[Run]:
    """Trains one model for each codec; rank 0 appends a JSON line to `progress_path` after each step of all of them."""
    text = corpus.load()
    trainings = [Training(comm, text, settings, codec) for codec in settings.codecs]
    for step in range(1, settings.steps + 1):
        for training in trainings:
            comm.barrier()  # nobody waits in this training for what another one left behind
            training.step()
            if step % settings.evaluate_every == 0 or step == settings.steps:
                training.evaluate()
        if comm.rank == 0:
            with progress_path.open("a") as progress:
                progress.write(
                    json.dumps({"step": step, "losses": [training.run.train_loss[-1] for training in trainings]}) + "\n"
                )
    return [training.finish() for training in trainings]


def main(arguments: list[str]) -> None:
    """One rank of the demo; rank 0 writes `progress.jsonl` and `runs.json` beside the settings."""
    settings_path = Path(arguments[0])
    settings = Settings.read(settings_path)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with squinchcomm.init(link_rate=settings.link_rate) as comm:
        runs = train(comm, settings, settings_path.parent / "progress.jsonl")
        if comm.rank == 0:
            (settings_path.parent / "runs.json").write_text(json.dumps([asdict(run) for run in runs]))


if __name__ == "__main__":
    main(sys.argv[1:])
