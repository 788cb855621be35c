"""What goes into a training and what comes out of it, as JSON between the ranks and the command line. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """What to train. Batch and length count tokens of one rank and step."""

    codecs: list[str]
    steps: int
    link_rate: str
    seed: int
    width: int = 256
    layers: int = 3
    heads: int = 4
    batch: int = 3
    length: int = 64
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    evaluate_every: int = 20
    evaluation_batches: int = 4  # a rank

    @classmethod
    def read(cls, path: Path) -> Settings:
        """From the JSON that `write` wrote."""
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1))


@dataclass
class Run:
    """What one training gave: a value a step, averaged over ranks, or a pair (step, value) an evaluation."""

    codec: str
    parameters: int = 0
    train_loss: list[float] = field(default_factory=list)
    held_out_loss: list[tuple[int, float]] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    communication_s: list[float] = field(default_factory=list)  # that backward waits for after its last bucket
    wire_bytes: list[int] = field(default_factory=list)  # sent by rank 0
    ranks_agree: bool = False
