"""Data-parallel training of the demo's model with `torch.distributed`: what one rank does, from top to bottom.

Started as `squinchcomm run -n 4 -m squinchcomm.demo.train SETTINGS.json`. Trains one model for each codec with DistributedDataParallel over
the backend "squinch", all from the same seeds, taking turns step by step, so that a slow moment of the machine hits all of them.
Rank 0 writes what the command line shows into files beside the settings.
"""

# No postponed annotations in this module: DDP compares the hook's with classes.

import hashlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from squinchcomm.demo import corpus
from squinchcomm.demo.model import ByteTransformer
from squinchcomm.demo.records import Run, Settings
from squinchcomm.torch import Options


class Training:
    """One model on all ranks, its gradients averaged with `codec` in a group of its own; `run` holds what came of it so far."""

    def __init__(self, text: corpus.Corpus, settings: Settings, codec: str) -> None:
        self.text, self.settings = text, settings
        options = Options(codec=codec, compress="auto", link_rate=settings.link_rate)
        self.group = dist.new_group(backend="squinch", pg_options=options)
        self.stats = self.group.communicator.stats
        model = ByteTransformer(
            width=settings.width, layers=settings.layers, heads=settings.heads, length=settings.length, seed=settings.seed
        )
        self.ddp = DistributedDataParallel(model, process_group=self.group)
        self.ddp.register_comm_hook(self, timed_average)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / settings.warmup_steps)
        )
        self.computed_at = 0.0  # when the last bucket of this step was ready
        self.rng = np.random.default_rng((settings.seed, dist.get_rank()))
        self.run = Run(codec, parameters=sum(parameter.numel() for parameter in model.parameters()))
        # What a first call takes once, such as loading compiled kernels, is not counted to the first step.
        dist.all_reduce(torch.zeros(self.run.parameters), group=self.group)

    def step(self) -> None:
        """One optimizer step on this rank's batch and everybody's gradients."""
        start, sent_before = time.perf_counter(), self.stats.sent_wire_bytes
        tokens = torch.from_numpy(corpus.batch(self.text.train, self.rng, self.settings.batch, self.settings.length))
        loss = self.ddp(tokens)
        self.optimizer.zero_grad()
        loss.backward()
        averaged_at = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        waited_s = averaged_at - self.computed_at
        self.run.train_loss.append(loss.item())
        self.run.wire_bytes.append(self.stats.sent_wire_bytes - sent_before)
        self.run.communication_s.append(waited_s)
        self.run.compute_s.append(time.perf_counter() - start - waited_s)

    @torch.no_grad()
    def evaluate(self) -> None:
        """Mean loss over the same held-out pieces at every call, each rank taking its share."""
        rng = np.random.default_rng((self.settings.seed, 1_000_000 + dist.get_rank()))
        pieces = [
            corpus.batch(self.text.held_out, rng, 4, self.settings.length) for _ in range(self.settings.evaluation_batches)
        ]
        losses = [self.ddp.module(torch.from_numpy(piece)).item() for piece in pieces]
        step = len(self.run.train_loss)
        self.run.held_out_loss.append((step, averaged([float(np.mean(losses))])[0]))

    def finish(self) -> Run:
        """What all ranks got together."""
        self.run.train_loss = averaged(self.run.train_loss)
        self.run.ranks_agree = ranks_agree(self.ddp)
        return self.run


def timed_average(
    training: Training,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """What DDP does without a hook; and notes when it is called last, which is when backward has nothing left but to wait."""
    training.computed_at = time.perf_counter()
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group=training.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def averaged(values: list[float]) -> list[float]:
    """Each value averaged over the ranks, losslessly."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    return tensor.tolist()


def ranks_agree(model: torch.nn.Module) -> bool:
    """True if all ranks hold the same bits in all parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    mine = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(other, mine) for other in everyones)


def train(settings: Settings, progress_path: Path) -> list[Run]:
    """Trains one model for each codec; rank 0 appends a JSON line to `progress_path` after each step of all of them."""
    text = corpus.load()
    trainings = [Training(text, settings, codec) for codec in settings.codecs]
    for step in range(1, settings.steps + 1):
        for training in trainings:
            dist.barrier()  # nobody waits in this training for what another one left behind
            training.step()
            if step % settings.evaluate_every == 0 or step == settings.steps:
                training.evaluate()
        if dist.get_rank() == 0:
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
    dist.init_process_group("squinch", pg_options=Options(codec="none", link_rate=settings.link_rate))
    runs = train(settings, settings_path.parent / "progress.jsonl")
    if dist.get_rank() == 0:
        (settings_path.parent / "runs.json").write_text(json.dumps([asdict(run) for run in runs]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
