"""Error feedback: what an encoding lost is kept for each parameter and added to its gradient in the next step.

Sources: 1-bit SGD (Seide and others, 2014), EF-SGD (Karimireddy and others, 2019). A rank keeps one residual a parameter, in units
of the sum over ranks. Where the rank encodes an element for its owner, the residual is the loss of that encoding; where it is the
owner, whose own contribution is exact, it is the loss of encoding the sum. The sum of all ranks' residuals is then all that was
lost, whoever owns an element next.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from squinchcomm.errors import ConfigError


class BucketResiduals:
    """Residuals of the parameters of one bucket, in its order, float32, one after the other.

    Attributes:
        current: What the previous step left.
        coming: What this step leaves, once all of it has succeeded.
    """

    def __init__(self, names: tuple[str, ...], shapes: Sequence[torch.Size]) -> None:
        self.names = names
        self.shapes = shapes
        self.current, self.coming = torch.zeros(2, sum(shape.numel() for shape in shapes))

    def parts(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Name and current residual of each parameter, in its shape."""
        pieces = self.current.split([shape.numel() for shape in self.shapes])
        for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True):
            yield name, piece.view(shape)

    def commit(self) -> None:
        """Makes what is coming current."""
        self.current, self.coming = self.coming, self.current


class ErrorFeedback:
    """Residuals of all parameters of one model on one rank.

    They follow the parameters when DDP rebuilds its buckets. A step's residuals take the place of the previous one's when the next
    step begins or a checkpoint is written, provided that all its buckets succeeded and were finite: a step
    that a GradScaler skips leaves them as they were.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        self._parameters: dict[int, tuple[str, torch.Tensor]] = {}
        self._from_module = module is not None
        if isinstance(module, DistributedDataParallel):
            module = module.module
        for name, parameter in module.named_parameters() if module is not None else ():
            self._parameters[id(parameter)] = name, parameter
        self._buckets: dict[tuple[str, ...], BucketResiduals] = {}
        self._holder: dict[str, tuple[str, ...]] = {}  # key in `_buckets` of the bucket that has a name's residual
        self._loaded: dict[str, torch.Tensor] | None = None
        self._opened: list[BucketResiduals] = []
        self._closed = 0
        self._lock = threading.Lock()

    def open(self, parameters: Sequence[torch.Tensor]) -> BucketResiduals:
        """The residuals of a bucket of this step."""
        names = tuple(self._name(parameter) for parameter in parameters)
        if names not in self._buckets:
            self._rearrange(names, [parameter.shape for parameter in parameters])
        bucket = self._buckets[names]
        self._opened.append(bucket)
        return bucket

    def close(self) -> None:
        """Says that a bucket of this step has succeeded, with finite gradients."""
        with self._lock:
            self._closed += 1

    def settle(self) -> None:
        """Ends the step: its residuals become current, or are forgotten if one of its buckets was never closed."""
        if self._closed == len(self._opened):
            for bucket in self._opened:
                bucket.commit()
        self._opened, self._closed = [], 0

    def residual_norm(self) -> float:
        """Euclidean length of all residuals of the previous step; one read of them. Any thread."""
        parts = [bucket.current for bucket in list(self._buckets.values())]
        return math.sqrt(sum(float(torch.linalg.vector_norm(part)) ** 2 for part in parts))

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the residuals by name, each in its parameter's shape."""
        self.settle()
        waiting = {} if self._loaded is None else {name: each.clone() for name, each in self._loaded.items()}
        return waiting | {name: piece.clone() for key in self._buckets for name, piece in self._held(key)}

    def load(self, residuals: dict[str, torch.Tensor]) -> None:
        """Takes residuals as `state` gave them; each is matched with its parameter when that is next seen.

        Raises:
            ConfigError: a name or shape that the module does not have, or a trained parameter without residual.
        """
        if self._from_module and residuals:
            self._check_names(residuals)
        self.reset()
        self._loaded = {
            name: residual.detach().to("cpu", torch.float32).clone() for name, residual in residuals.items()
        } or None

    def reset(self) -> None:
        """Forgets all residuals."""
        self._buckets, self._holder, self._loaded = {}, {}, None
        self._opened, self._closed = [], 0

    def _name(self, parameter: torch.Tensor) -> str:
        known = self._parameters.get(id(parameter))
        if known is None:
            if self._from_module:
                raise ConfigError(
                    f"DDP reduces a parameter of shape {tuple(parameter.shape)} that is not in the module given to CompressState; "
                    "pass the model that the hook is registered on, and use one state for each model"
                )
            known = self._parameters[id(parameter)] = str(len(self._parameters)), parameter
        return known[0]

    def _check_names(self, residuals: dict[str, torch.Tensor]) -> None:
        known = dict(self._parameters.values())
        if unknown := [name for name in residuals if name not in known]:
            raise ConfigError(f"the checkpoint has residuals of {_few(unknown)}, which the module has not; {_ADVICE}")
        if missing := [name for name, each in known.items() if each.requires_grad and name not in residuals]:
            raise ConfigError(f"the checkpoint has no residuals of {_few(missing)}; {_ADVICE}")
        for name, residual in residuals.items():
            _check_shape(name, residual, known[name].shape)

    def _rearrange(self, names: tuple[str, ...], shapes: Sequence[torch.Size]) -> None:
        """Makes a bucket's residuals out of those that its parameters have so far."""
        bucket = BucketResiduals(names, shapes)
        sources = {self._holder[name] for name in names if name in self._holder}
        before = {name: piece for key in sources for name, piece in self._held(key)}
        for name, piece in bucket.parts():
            if name in before:
                piece.copy_(before[name])
            elif self._loaded is not None:
                self._take_loaded(name, piece)
        self._buckets[names] = bucket
        self._holder.update(dict.fromkeys(names, names))
        for key in sources:
            if not any(self._held(key)):
                del self._buckets[key]

    def _held(self, key: tuple[str, ...]) -> Iterable[tuple[str, torch.Tensor]]:
        """The parts of a bucket that no newer bucket has taken over."""
        return ((name, piece) for name, piece in self._buckets[key].parts() if self._holder[name] == key)

    def _take_loaded(self, name: str, piece: torch.Tensor) -> None:
        assert self._loaded is not None
        residual = self._loaded.pop(name, None)
        if residual is not None:
            _check_shape(name, residual, piece.shape)
            piece.copy_(residual)
        elif not self._from_module:
            raise ConfigError(f"the loaded checkpoint has no residual of parameter {name!r}; {_ADVICE}")


_ADVICE = "load the checkpoint of this model, or leave load_state_dict out to start from zero residuals"


def _check_shape(name: str, residual: Any, shape: torch.Size) -> None:
    if not isinstance(residual, torch.Tensor) or residual.shape != shape:
        found = tuple(residual.shape) if isinstance(residual, torch.Tensor) else type(residual).__name__
        raise ConfigError(f"the residual of parameter {name!r} has shape {found}, the parameter {tuple(shape)}; {_ADVICE}")


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
